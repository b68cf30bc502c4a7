//! Where the pictures of a batch lie in memory, and what the kernels are told of them.

use super::error;
use crate::build::Source;
use crate::error::Result;
use crate::kernels::{PICTURES, PRELUDE};

/// The kernel that scales rows.
pub(super) const ROWS: &str = "kiln_rows_of_pictures";
/// The kernel that scales columns and normalises.
pub(super) const COLUMNS: &str = "kiln_columns_of_pictures";

/// Where a picture begins: as memory of its own would.
const BORDER: usize = 256;

/// The longest side of a picture; that of pictures that the host decodes, too.
const LONGEST: u32 = 1 << 14;

/// The pixels of a picture.
#[derive(Clone, Copy, Debug)]
pub enum Pixels<'a> {
    /// A JPEG file: baseline, of one scan.
    Jpeg(&'a [u8]),
    /// `[height, width, 3]`: red, green and blue.
    Rgb(&'a [u8]),
}

/// A picture of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Picture<'a> {
    /// What it shows.
    pub pixels: Pixels<'a>,
    /// Pixels a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Which part of it goes into the batch.
    pub view: View,
}

impl Picture<'_> {
    /// Bytes of its pixels when they are decoded.
    pub fn bytes(&self) -> usize {
        3 * self.width as usize * self.height as usize
    }
}

/// A part of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rectangle {
    /// The first column.
    pub x: u32,
    /// The first row.
    pub y: u32,
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

/// What becomes of a picture: a rectangle is cut out and scaled, and a window of that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// What is scaled. Pixels beside it do not count.
    pub from: Rectangle,
    /// Its width and height then.
    pub scaled: (u32, u32),
    /// Where the window begins in what was scaled; a part of it that lies outside is black.
    pub window: (i32, i32),
    /// Whether the window is mirrored left to right.
    pub mirrored: bool,
}

/// What the windows of a batch have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frame {
    /// Columns of a window.
    pub width: u32,
    /// Rows of a window.
    pub height: u32,
    /// The factor of a level from 0 to 255, by channel.
    pub scale: [f32; 3],
    /// What is added to it then.
    pub shift: [f32; 3],
}

impl Frame {
    /// Elements of a picture in the batch.
    pub fn elements(&self) -> usize {
        3 * self.width as usize * self.height as usize
    }
}

/// The program with both kernels.
pub fn source() -> Source {
    let kernel = |name: &str, calls: &str, to: &str| {
        format!(
            "extern \"C\" __global__ void {name}(const kiln_frame* frame, const unsigned char* from, {to}* to)\n\
             {{\n    {calls}(frame, from, to);\n}}\n\n"
        )
    };
    let text = [
        PRELUDE,
        PICTURES,
        &kernel(ROWS, "kiln_picture_rows", "unsigned char"),
        &kernel(COLUMNS, "kiln_picture_columns", "float"),
    ];
    Source {
        name: "pictures".into(),
        text: text.join("\n"),
    }
}

/// A batch in memory.
#[derive(Debug)]
pub struct Layout {
    /// `kiln_frame` and a `kiln_view` for each picture.
    pub table: Vec<u8>,
    /// Where each picture begins among the decoded pixels.
    pub places: Vec<usize>,
    /// Bytes of the decoded pixels of all pictures.
    pub decoded_bytes: usize,
    /// Bytes of their scaled rows.
    pub narrowed_bytes: usize,
}

impl Layout {
    /// Gives every picture its place.
    ///
    /// # Errors
    /// [`crate::CudaError::Pictures`] if a view is not inside its picture or nothing would be seen of it.
    pub fn new(pictures: &[Picture<'_>], frame: &Frame) -> Result<Self> {
        let mut layout = Self {
            table: Vec::new(),
            places: Vec::with_capacity(pictures.len()),
            decoded_bytes: 0,
            narrowed_bytes: 0,
        };
        layout.words(&[frame.width, frame.height]);
        layout.words(&frame.scale.map(f32::to_bits));
        layout.words(&frame.shift.map(f32::to_bits));
        check_all(pictures, frame)?;
        pictures.iter().for_each(|picture| layout.add(picture, frame));
        Ok(layout)
    }

    fn add(&mut self, picture: &Picture<'_>, frame: &Frame) {
        let View {
            from,
            scaled,
            window,
            mirrored,
        } = picture.view;
        let pitch = 3 * picture.width as usize;
        let begin = self.decoded_bytes + from.y as usize * pitch + 3 * from.x as usize;
        let rows = rows(&picture.view, frame);
        let count = rows.end - rows.start;
        for place in [begin, self.narrowed_bytes] {
            self.table.extend_from_slice(&(place as u64).to_ne_bytes());
        }
        self.words(&[pitch as u32, from.width, from.height, scaled.0, scaled.1]);
        self.words(&[
            window.0 as u32,
            window.1 as u32,
            u32::from(mirrored),
            rows.start,
            count,
        ]);
        self.places.push(self.decoded_bytes);
        self.decoded_bytes += picture.bytes().next_multiple_of(BORDER);
        self.narrowed_bytes += 3 * count as usize * frame.width as usize;
    }

    fn words(&mut self, words: &[u32]) {
        self.table
            .extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    }
}

/// The rows of a rectangle that a view's columns are made of, and perhaps one more on each side.
fn rows(view: &View, frame: &Frame) -> std::ops::Range<u32> {
    let (from, scaled) = (f64::from(view.from.height), f64::from(view.scaled.1));
    let step = from / scaled;
    let first = f64::from(view.window.1).max(0.0);
    let end = (f64::from(view.window.1) + f64::from(frame.height)).min(scaled);
    if first >= end {
        return 0..0;
    }
    let reach = step.max(1.0) + 2.0;
    let least = (first * step - reach).clamp(0.0, from);
    let most = (end * step + reach).clamp(0.0, from);
    least.floor() as u32..most.ceil() as u32
}

/// Whether pictures can be a batch.
///
/// # Errors
/// [`crate::CudaError::Pictures`] with the number of one that cannot.
pub(super) fn check_all(pictures: &[Picture<'_>], frame: &Frame) -> Result<()> {
    pictures.iter().enumerate().try_for_each(|(number, picture)| {
        check(picture, frame).map_err(|what| error(format!("picture {number} of a batch: {what}")))
    })
}

/// Why a picture cannot be a part of a batch.
fn check(picture: &Picture<'_>, frame: &Frame) -> std::result::Result<(), String> {
    let Picture { width, height, .. } = *picture;
    let View { from, scaled, .. } = picture.view;
    let sides = [width, height, scaled.0, scaled.1, frame.width, frame.height];
    if sides.iter().any(|&side| side == 0 || side > LONGEST) {
        return Err(format!(
            "{width}x{height} pixels, scaled to {}x{} for {}x{}: a side has 1 to {LONGEST} pixels",
            scaled.0, scaled.1, frame.width, frame.height
        ));
    }
    let is_inside = |begin: u32, length: u32, side: u32| {
        length > 0 && begin.checked_add(length).is_some_and(|end| end <= side)
    };
    if !is_inside(from.x, from.width, width) || !is_inside(from.y, from.height, height) {
        return Err(format!("{from:?} is not inside its {width}x{height} pixels"));
    }
    match picture.pixels {
        Pixels::Rgb(rgb) if rgb.len() != picture.bytes() => {
            Err(format!("{} bytes for {width}x{height} pixels", rgb.len()))
        }
        _ => Ok(()),
    }
}
