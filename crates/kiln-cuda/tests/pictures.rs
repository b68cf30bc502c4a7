//! Batches of pictures: the kernels that crop, scale and normalise run on the host and are compared with sums
//! of 64 bits; on a GPU with engines for JPEGs, whole batches are compared with what the host decodes.

mod common;

use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::code::FunctionText;
use kiln_cuda::kernels::PICTURES;
use kiln_cuda::pictures::{Decoder, Frame, Layout, Picture, Pixels, Rectangle, View, source};
use kiln_cuda::testing::host::{HostStep, one_kernel};
use kiln_graph::DType;
use kiln_graph::philox;

/// A picture of the host's.
struct Decoded {
    width: u32,
    height: u32,
    rgb: Vec<u8>,
}

impl Decoded {
    /// Waves with noise.
    fn new(width: u32, height: u32, seed: u64) -> Self {
        let level = |at: u32| {
            let noise = philox::uniform(seed, 0, u64::from(at), DType::F32) as f32;
            let (x, y, c) = (at / 3 % width, at / 3 / width, at % 3);
            let wave = ((x + 7 * c) as f32 / 9.0).sin() + (y as f32 / 5.0).cos();
            (128.0 + 40.0 * wave + 90.0 * (noise - 0.5)).clamp(0.0, 255.0) as u8
        };
        Self {
            width,
            height,
            rgb: (0..width * height * 3).map(level).collect(),
        }
    }

    fn picture(&self, view: View) -> Picture<'_> {
        Picture {
            pixels: Pixels::Rgb(&self.rgb),
            width: self.width,
            height: self.height,
            view,
        }
    }
}

/// The weights of the pixels of a line that becomes pixel `at` of `scaled`, from the definition: a triangle
/// around its middle that is as wide as two pixels of the longer grid.
fn weights(at: i64, from: u32, scaled: u32) -> Vec<(u32, f64)> {
    let step = f64::from(from) / f64::from(scaled);
    let (middle, wide) = ((at as f64 + 0.5) * step, step.max(1.0));
    let weight = |x: u32| (x, 1.0 - (f64::from(x) + 0.5 - middle).abs() / wide);
    let all: Vec<_> = (0..from)
        .map(weight)
        .filter(|&(_, weight)| weight > 0.0)
        .collect();
    let total: f64 = all.iter().map(|&(_, weight)| weight).sum();
    all.into_iter().map(|(x, weight)| (x, weight / total)).collect()
}

/// The batch that a picture and its view make, in levels, without any rounding between rows and columns.
fn exact(decoded: &Decoded, view: &View, frame: &Frame) -> Vec<f64> {
    let (width, height) = (frame.width as usize, frame.height as usize);
    let mut levels = vec![0.0; 3 * width * height];
    for row in 0..height {
        for column in 0..width {
            let x = i64::from(view.window.0) + column as i64;
            let y = i64::from(view.window.1) + row as i64;
            if x < 0 || y < 0 || x >= i64::from(view.scaled.0) || y >= i64::from(view.scaled.1) {
                continue;
            }
            let across = weights(x, view.from.width, view.scaled.0);
            let down = weights(y, view.from.height, view.scaled.1);
            let to = if view.mirrored { width - 1 - column } else { column };
            for c in 0..3 {
                let mut sum = 0.0;
                for &(y, of_row) in &down {
                    for &(x, of_column) in &across {
                        let at = ((view.from.y + y) * decoded.width + view.from.x + x) * 3;
                        sum += of_row * of_column * f64::from(decoded.rgb[at as usize + c]);
                    }
                }
                levels[(c * height + row) * width + to] = sum;
            }
        }
    }
    levels
}

/// One of the kernels on the host: what it makes of the table and of `from`.
fn run(kernel: &str, to: &str, layout: &Layout, from: &[u8], bytes: usize) -> Vec<u8> {
    let text = FunctionText {
        helpers: PICTURES.to_owned(),
        parameters: vec![
            "const kiln_frame* frame".into(),
            "const unsigned char* from".into(),
            format!("{to}* to"),
        ],
        body: format!("{kernel}(frame, from, to);"),
        threads: 64,
        device_only: false,
        blocks: 0,
    };
    let grid = [layout.places.len() as u32, 3, 1];
    let code = one_kernel(text, grid, 0, vec![layout.table.len(), from.len()], vec![bytes]);
    let step = HostStep::build(&code).unwrap();
    let mut inputs = [layout.table.clone(), from.to_vec()];
    step.run(&mut inputs, &[]).unwrap().remove(0)
}

const FRAME: Frame = Frame {
    width: 20,
    height: 14,
    scale: [0.5, 2.0, 1.0],
    shift: [1.0, -3.0, 0.0],
};

/// What users ask for, and what is at the edge of it.
fn cases() -> Vec<(Decoded, View)> {
    let whole = |width, height| Rectangle {
        x: 0,
        y: 0,
        width,
        height,
    };
    let view = |from, scaled, window, mirrored| View {
        from,
        scaled,
        window,
        mirrored,
    };
    let part = |x, y, width, height| Rectangle { x, y, width, height };
    let frame = (FRAME.width, FRAME.height);
    vec![
        // A random crop that shrinks, grows, or keeps its size.
        (
            Decoded::new(61, 47, 1),
            view(part(5, 3, 50, 40), frame, (0, 0), false),
        ),
        (
            Decoded::new(61, 47, 2),
            view(part(40, 30, 7, 5), frame, (0, 0), true),
        ),
        (
            Decoded::new(61, 47, 3),
            view(part(41, 33, 20, 14), frame, (0, 0), true),
        ),
        // A crop in the middle of a picture that was scaled first, as evaluation takes it.
        (
            Decoded::new(90, 64, 4),
            view(whole(90, 64), (34, 24), (7, 5), false),
        ),
        // One that is larger than the picture, whose edge is black; one beside it.
        (
            Decoded::new(12, 9, 5),
            view(whole(12, 9), (12, 9), (-4, -2), true),
        ),
        (
            Decoded::new(12, 9, 6),
            view(whole(12, 9), (12, 9), (30, 2), false),
        ),
        // A single pixel, a line, and much smaller in one direction than in the other.
        (Decoded::new(1, 1, 7), view(whole(1, 1), frame, (0, 0), false)),
        (Decoded::new(300, 1, 8), view(whole(300, 1), frame, (0, 0), false)),
        (
            Decoded::new(33, 400, 9),
            view(whole(33, 400), frame, (0, 0), true),
        ),
    ]
}

/// How far two batches of floats are apart, in levels.
fn farthest(batch: &[f32], cases: &[(Decoded, View)]) -> f64 {
    let elements = FRAME.elements();
    let plane = elements / 3;
    let mut most = 0.0_f64;
    for (values, (decoded, view)) in batch.chunks_exact(elements).zip(cases) {
        for (at, (value, exact)) in values.iter().zip(exact(decoded, view, &FRAME)).enumerate() {
            let channel = at / plane;
            let level = (value - FRAME.shift[channel]) / FRAME.scale[channel];
            most = most.max((f64::from(level) - exact).abs());
        }
    }
    most
}

#[test]
fn pictures_are_cropped_scaled_and_normalised() {
    let cases = cases();
    let pictures: Vec<_> = cases
        .iter()
        .map(|(decoded, view)| decoded.picture(*view))
        .collect();
    let layout = Layout::new(&pictures, &FRAME).unwrap();
    let mut decoded = vec![0; layout.decoded_bytes];
    for ((picture, _), &place) in cases.iter().zip(&layout.places) {
        decoded[place..place + picture.rgb.len()].copy_from_slice(&picture.rgb);
    }
    let narrowed = run(
        "kiln_picture_rows",
        "unsigned char",
        &layout,
        &decoded,
        layout.narrowed_bytes,
    );
    let bytes = pictures.len() * FRAME.elements() * 4;
    let batch = common::numbers(&run("kiln_picture_columns", "float", &layout, &narrowed, bytes));
    // Half a level for each of the two roundings.
    let farthest = farthest(&batch, &cases);
    assert!(farthest <= 1.01, "{farthest} levels from the exact average");
}

#[test]
fn views_outside_their_pictures_are_refused() {
    let decoded = Decoded::new(10, 8, 1);
    let view = View {
        from: Rectangle {
            x: 2,
            y: 1,
            width: 8,
            height: 7,
        },
        scaled: (20, 14),
        window: (0, 0),
        mirrored: false,
    };
    assert!(Layout::new(&[decoded.picture(view)], &FRAME).is_ok());
    let refused = |change: &dyn Fn(&mut Picture<'_>)| {
        let mut picture = decoded.picture(view);
        change(&mut picture);
        Layout::new(&[picture], &FRAME).unwrap_err().to_string()
    };
    let outside = refused(&|picture| picture.view.from.x = 3);
    assert!(
        outside.contains("picture 0 of a batch") && outside.contains("10x8"),
        "{outside}"
    );
    assert!(refused(&|picture| picture.view.from.height = u32::MAX).contains("is not inside"));
    assert!(refused(&|picture| picture.view.scaled.0 = 0).contains("a side has 1 to"));
    assert!(refused(&|picture| picture.height = 9).contains("240 bytes for 10x9"));
}

#[test]
fn the_program_compiles_for_every_generation() {
    let Some(nvrtc) = common::nvrtc() else { return };
    for capability in [(8, 0), (9, 0)] {
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        compiler
            .compile(&[source()])
            .unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_gpu_makes_the_same_batch() {
    let Some(gpu) = common::gpu() else { return };
    let decoder = Decoder::new(&gpu.device, &gpu.compiler, common::search()).unwrap();
    let cases = cases();
    let pictures: Vec<_> = cases
        .iter()
        .map(|(decoded, view)| decoded.picture(*view))
        .collect();
    let batch = decoder.batch(&pictures, &FRAME).unwrap();
    let mut bytes = vec![0; batch.bytes()];
    gpu.stream.read(&batch, 0, &mut bytes).unwrap();
    let farthest = farthest(&common::numbers(&bytes), &cases);
    assert!(farthest <= 1.01, "{farthest} levels from the exact average");

    // In parts it is the same batch, be they of a picture each.
    for most in [1, 50_000] {
        let decoder = Decoder::new(&gpu.device, &gpu.compiler, common::search()).unwrap();
        let batch = decoder.with_most_decoded(most).batch(&pictures, &FRAME).unwrap();
        let mut parts = vec![0; batch.bytes()];
        gpu.stream.read(&batch, 0, &mut parts).unwrap();
        assert!(parts == bytes, "at most {most} bytes of pixels at a time");
    }

    // What is no JPEG is refused, and the next batch is decoded.
    let mut damaged = pictures.clone();
    damaged[1].pixels = Pixels::Jpeg(b"no JPEG at all");
    let refused = decoder.batch(&damaged, &FRAME).unwrap_err().to_string();
    match decoder.engines() {
        Ok(count) => assert!(count > 0 && refused.contains("nvjpegGetImageInfo"), "{refused}"),
        Err(error) => assert_eq!(refused, error.to_string()),
    }
    let again = decoder.batch(&pictures, &FRAME).unwrap();
    let mut after = vec![0; again.bytes()];
    gpu.stream.read(&again, 0, &mut after).unwrap();
    assert!(bytes == after, "two batches of the same pictures differ");
}
