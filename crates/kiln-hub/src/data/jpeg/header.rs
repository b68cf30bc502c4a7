//! The segments of a JPEG file in front of its picture.

use std::rc::Rc;

use super::entropy::Codes;
use super::{Baseline, Component};

/// Pixels a side that are decoded, as for other files.
const MOST_PIXELS: usize = 1 << 14;

/// What the segments have said so far.
#[derive(Default)]
struct Segments {
    steps: [Option<[i32; 64]>; 4],
    dc: [Option<Rc<Codes>>; 4],
    ac: [Option<Rc<Codes>>; 4],
    restart: usize,
    frame: Option<Frame>,
}

/// The size and the components, each with its name, its sampling factors and its table of steps.
struct Frame {
    width: usize,
    height: usize,
    components: Vec<(u8, (usize, usize), usize)>,
}

impl<'a> Baseline<'a> {
    /// Reads the headers. `None` if the file is no JPEG, or one that [the module](super) leaves to others.
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(&[0xff, 0xd8])?;
        let mut segments = Segments::default();
        loop {
            let (&[0xff, marker], after) = rest.split_first_chunk()? else {
                return None;
            };
            let length = usize::from(u16::from_be_bytes(*after.first_chunk()?));
            let body = after.get(2..length)?;
            rest = &after[length..];
            match marker {
                0xdb => segments.quantisation(body)?,
                0xc4 => segments.huffman(body)?,
                0xdd => segments.restart = usize::from(u16::from_be_bytes(body.try_into().ok()?)),
                0xc0 => segments.frame(body)?,
                0xda => return segments.scan(body, rest),
                // Adobe's: its last byte tells the colours, of which 1 is YCbCr.
                0xee if body.starts_with(b"Adobe") && body.get(11) != Some(&1) => return None,
                // Other applications and comments.
                0xe0..=0xef | 0xfe => {}
                _ => return None,
            }
        }
    }
}

impl Segments {
    fn quantisation(&mut self, mut body: &[u8]) -> Option<()> {
        while let Some((&table, rest)) = body.split_first() {
            // The upper half would announce 16 bits a step.
            let (values, rest) = rest.split_first_chunk::<64>()?;
            *self.steps.get_mut(usize::from(table))? = Some(values.map(i32::from));
            body = rest;
        }
        Some(())
    }

    fn huffman(&mut self, mut body: &[u8]) -> Option<()> {
        while let Some((&class, rest)) = body.split_first() {
            let (counts, rest) = rest.split_first_chunk::<16>()?;
            let symbols = counts.iter().map(|&n| usize::from(n)).sum();
            let (symbols, rest) = rest.split_at_checked(symbols)?;
            let codes = Rc::new(Codes::new(counts, symbols, class >> 4 == 1)?);
            let tables = match class >> 4 {
                0 => &mut self.dc,
                1 => &mut self.ac,
                _ => return None,
            };
            *tables.get_mut(usize::from(class & 15))? = Some(codes);
            body = rest;
        }
        Some(())
    }

    fn frame(&mut self, body: &[u8]) -> Option<()> {
        let (&[8, h1, h0, w1, w0, count], rest) = body.split_first_chunk()? else {
            return None;
        };
        let (width, height) = (u16::from_be_bytes([w1, w0]), u16::from_be_bytes([h1, h0]));
        let (width, height) = (usize::from(width), usize::from(height));
        let side = 1..=MOST_PIXELS;
        let is_new = self.frame.is_none() && rest.len() == 3 * usize::from(count);
        if !is_new || !side.contains(&width) || !side.contains(&height) {
            return None;
        }
        let component = |bytes: &[u8]| {
            let sampling = (usize::from(bytes[1] >> 4), usize::from(bytes[1] & 15));
            (bytes[0], sampling, usize::from(bytes[2]))
        };
        let components: Vec<_> = rest.chunks_exact(3).map(component).collect();
        match components.as_slice() {
            // A component alone is stored block by block, whatever its factors.
            [(_, (1, 1), _)] => {}
            // Names are as good as any, but those of red, green and blue.
            [(a, (1 | 2, 1 | 2), _), (b, (1, 1), _), (c, (1, 1), _)]
                if [*a, *b, *c] != *b"RGB" && a != b && b != c && a != c => {}
            _ => return None,
        }
        self.frame = Some(Frame {
            width,
            height,
            components,
        });
        Some(())
    }

    /// All components, in their order, in one scan.
    fn scan<'a>(self, body: &[u8], scan: &'a [u8]) -> Option<Baseline<'a>> {
        let frame = self.frame?;
        let (&count, body) = body.split_first()?;
        let named = body.strip_suffix(&[0, 63, 0])?;
        if usize::from(count) != frame.components.len() || named.len() != 2 * usize::from(count) {
            return None;
        }
        let mut components = Vec::with_capacity(frame.components.len());
        for (&(name, sampling, steps), named) in frame.components.iter().zip(named.chunks_exact(2)) {
            if named[0] != name {
                return None;
            }
            components.push(Component {
                sampling,
                steps: (*self.steps.get(steps)?)?,
                dc: self.dc.get(usize::from(named[1] >> 4))?.clone()?,
                ac: self.ac.get(usize::from(named[1] & 15))?.clone()?,
            });
        }
        Some(Baseline {
            width: frame.width,
            height: frame.height,
            sampling: components[0].sampling,
            components,
            restart: self.restart,
            scan,
        })
    }
}
