//! Pictures drawn by the program: geometric shapes in noise, for runs that need no download.
//!
//! Each picture has one shape of a random colour, size, place and turn on a background of another colour,
//! both shaded, with noise on every pixel. The class is the shape. Nothing but outline tells the classes
//! apart (colour, size and place have the same distribution in all), so a model that learns them has learned
//! to see edges. Picture `i` of seed `s` is always the same.

use super::error::DataError;
use super::image::{ImageSource, Picture};
use super::rng::Rng;

/// The shapes, in the order of their labels.
const NAMES: [&str; 8] = [
    "circle", "square", "triangle", "cross", "ring", "star", "bar", "crescent",
];

/// Drawn pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct Shapes {
    len: usize,
    size: usize,
    seed: u64,
    noise: f32,
    classes: Vec<String>,
}

impl Shapes {
    /// `len` pictures of `size` by `size` pixels with all eight shapes. Training and evaluation take
    /// different seeds.
    pub fn new(len: usize, size: usize, seed: u64) -> Self {
        Self {
            len,
            size,
            seed,
            noise: 0.08,
            classes: NAMES.map(str::to_string).to_vec(),
        }
    }

    /// Only the first `classes` shapes, from 1 to 8.
    pub fn with_classes(mut self, classes: usize) -> Self {
        self.classes = NAMES[..classes.clamp(1, NAMES.len())]
            .iter()
            .map(|name| name.to_string())
            .collect();
        self
    }

    /// Standard deviation of the noise, of values from 0 to 1; 0.08 by default.
    pub fn with_noise(mut self, noise: f32) -> Self {
        self.noise = noise;
        self
    }
}

impl ImageSource for Shapes {
    fn len(&self) -> usize {
        self.len
    }

    fn picture(&self, index: usize) -> Result<(Picture, usize), DataError> {
        if index >= self.len {
            return Err(DataError::OutOfRange { index, len: self.len });
        }
        // Every class occurs as often as any other, whatever the length.
        let label = index % self.classes.len();
        let mut rng = Rng::at(&[self.seed, index as u64]);
        Ok((draw(label, self.size, self.noise, &mut rng), label))
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }
}

fn draw(label: usize, size: usize, noise: f32, rng: &mut Rng) -> Picture {
    let background = colour(rng);
    let mut foreground = colour(rng);
    // Far enough apart to be seen: luminance differs by a quarter at least.
    while (luminance(foreground) - luminance(background)).abs() < 0.25 {
        foreground = colour(rng);
    }
    let radius = rng.range(0.22, 0.38);
    let (cx, cy) = (rng.range(radius, 1.0 - radius), rng.range(radius, 1.0 - radius));
    let (sin, cos) = rng.range(0.0, std::f32::consts::TAU).sin_cos();
    let shade = (rng.range(-0.15, 0.15), rng.range(-0.15, 0.15));
    // The edge is one pixel wide.
    let softness = 1.0 / (size as f32 * radius);

    let mut picture = Picture::filled(size, size, [0; 3]);
    for y in 0..size {
        for x in 0..size {
            let (px, py) = ((x as f32 + 0.5) / size as f32, (y as f32 + 0.5) / size as f32);
            // In the shape's own frame: turned, and scaled so that it fits the unit circle.
            let (dx, dy) = ((px - cx) / radius, (py - cy) / radius);
            let distance = outside(label, dx * cos + dy * sin, dy * cos - dx * sin);
            let cover = (0.5 - distance / softness).clamp(0.0, 1.0);
            let light = 1.0 + shade.0 * (2.0 * px - 1.0) + shade.1 * (2.0 * py - 1.0);
            let at = (y * size + x) * 3;
            for channel in 0..3 {
                let plain = background[channel] + (foreground[channel] - background[channel]) * cover;
                let value = plain * light + noise * rng.normal();
                picture.rgb[at + channel] = (value.clamp(0.0, 1.0) * 255.0).round() as u8;
            }
        }
    }
    picture
}

fn colour(rng: &mut Rng) -> [f32; 3] {
    [rng.range(0.1, 0.9), rng.range(0.1, 0.9), rng.range(0.1, 0.9)]
}

/// Rec. 709 weights.
fn luminance(rgb: [f32; 3]) -> f32 {
    0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]
}

/// How far a point is outside a shape (negative inside); exact enough near the outline for a soft edge.
fn outside(label: usize, x: f32, y: f32) -> f32 {
    let circle = |x: f32, y: f32, r: f32| x.hypot(y) - r;
    let rectangle = |x: f32, y: f32, w: f32, h: f32| (x.abs() - w).max(y.abs() - h);
    match NAMES[label] {
        "circle" => circle(x, y, 0.9),
        "square" => rectangle(x, y, 0.7, 0.7),
        // Three half-planes at 120 degrees.
        "triangle" => {
            let side = |angle: f32| x * angle.cos() + y * angle.sin() - 0.5;
            let third = std::f32::consts::TAU / 3.0;
            side(0.0).max(side(third)).max(side(2.0 * third))
        }
        "cross" => rectangle(x, y, 0.95, 0.28).min(rectangle(x, y, 0.28, 0.95)),
        "ring" => circle(x, y, 0.9).max(-circle(x, y, 0.5)),
        // A radius that swings between tip and notch five times a turn.
        "star" => x.hypot(y) - 0.66 - 0.3 * (5.0 * y.atan2(x)).cos(),
        "bar" => rectangle(x, y, 1.0, 0.3),
        _ => circle(x, y, 0.9).max(-circle(x - 0.5, y, 0.75)),
    }
}
