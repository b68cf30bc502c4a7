//! Planes of channels-first images, with room around them, in a thread's own memory.

use super::{Param, Width, round_up, unpack};

/// A padded plane: element `(y, x)` of the image is at `(y * spread + before)` in each direction.
pub(super) struct Slab {
    before: [i64; 2],
    rows: usize,
    /// Elements between rows.
    pub pitch: usize,
    spread: [usize; 2],
    extents: [usize; 2],
    /// C expression of the elements around the plane.
    around: &'static str,
}

impl Slab {
    /// `width`: elements of a row that are read, past the end by whole vectors included.
    pub fn new(
        extents: [usize; 2],
        before: [i64; 2],
        rows: usize,
        width: usize,
        spread: [usize; 2],
        lanes: usize,
    ) -> Self {
        Self {
            before,
            rows,
            pitch: round_up(width, lanes),
            spread,
            extents,
            around: "0.0f",
        }
    }

    /// Bytes in the workspace.
    pub fn bytes(&self, lanes: usize) -> usize {
        round_up((self.rows * self.pitch + 2 * lanes) * 4, 64)
    }

    /// The same slab with this C expression around the plane instead of zero.
    pub fn surrounded_by(mut self, around: &'static str) -> Self {
        self.around = around;
        self
    }

    /// `function(args, image, channel, slab)`: fills the slab with a plane. `load` gives the element at, or
    /// the vector from, `(image, channel, y, x)`.
    pub fn fill(
        &self,
        load: &dyn Fn(Width) -> String,
        prefix: &str,
        function: &str,
        params: &[Param],
        lanes: usize,
    ) -> String {
        let [by, bx] = self.before;
        let [sy, sx] = self.spread;
        let [height, width] = self.extents;
        let pitch = self.pitch;
        let first = (-bx).max(0).div_euclid(sx as i64) + i64::from((-bx).max(0).rem_euclid(sx as i64) != 0);
        let last = ((pitch as i64 - bx + sx as i64 - 1).div_euclid(sx as i64))
            .clamp(first, (width as i64).max(first));
        let vectors = if sx == 1 {
            format!(
                "        for (; x + {lanes} <= {last}; x += {lanes}) vf_store(row + {bx} + x, {});\n",
                load(Width::Vector)
            )
        } else {
            String::new()
        };
        format!(
            "/* Copies a plane with room around it. */\nstatic void {function}(const struct {prefix}_args *args, int64_t \
             image, int64_t channel, float *slab) {{\n{}    for (int64_t i = 0; i < {}; i++) slab[i] = {};\n    for (int64_t r = 0; r < {}; \
             r++) {{\n        const int64_t shifted = r - {by}, y = shifted / {sy};\n        if (shifted < 0 || shifted % {sy} != 0 || y >= \
             {height}) continue;\n        float *row = slab + r * {pitch};\n        int64_t x = {first};\n{vectors}        for (; x < {last}; \
             x++) row[{bx} + x * {sx}] = {};\n    }}\n}}\n",
            unpack(params),
            self.rows * pitch + 2 * lanes,
            self.around,
            self.rows,
            load(Width::Scalar),
        )
    }
}

/// C expression of the elements at `p`, `p + stride`, ...
pub(super) fn spaced(p: &str, stride: usize, lanes: usize) -> String {
    match stride {
        1 => format!("vf_load({p})"),
        2 => {
            let even: Vec<String> = (0..lanes).map(|l| (2 * l).to_string()).collect();
            format!(
                "KILN_SHUFFLE(vf_load({p}), vf_load({p} + {lanes}), {})",
                even.join(", ")
            )
        }
        _ => format!("vf_load_stride({p}, {stride})"),
    }
}
