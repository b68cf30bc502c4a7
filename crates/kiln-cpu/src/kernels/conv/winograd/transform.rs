//! The transforms of Winograd's convolutions: small matrices applied to both sides of a tile, vectors along
//! the channels.
//!
//! `F(m x m, 3 x 3)` computes `m x m` results from a tile of `t = m + 2` by `t` elements with `t * t`
//! multiplications a channel: `Y = A' [(G g G') * (B' d B)] A`. The matrices are those of Lavin and Gray,
//! *Fast algorithms for convolutional neural networks* (2015), for `m = 2` from the points 0, 1, -1 and
//! infinity, for `m = 4` from 0, [`POINTS`] with both signs, and infinity. The weight gradient is the
//! transpose of the same bilinear form: `dg = G' [sum over tiles of (A dY A') * (B' d B)] G`.

use crate::kernels::indent;

/// The points of `m = 4`. With the usual points 1 and 2 results round more than twice as much, because
/// powers of 2 enlarge the rounding errors of the products. These are the best of the fractions of 16,
/// which f32 represents exactly.
const POINTS: [f64; 2] = [0.6875, 1.5];

/// A matrix by rows.
pub(super) type Matrix = Vec<Vec<f64>>;

/// The matrices for results of `m x m`.
pub(super) struct Matrices {
    /// Elements of a tile along each dimension: `m + 2`.
    pub tile: usize,
    /// `B'`: tile to tile.
    pub input: Matrix,
    /// `G` without [`Matrices::scale`], 3 to tile: numbers that f32 represents exactly.
    pub kernel: Matrix,
    /// The factor of each row of `G`. It is no fraction of a power of 2, so multiplying by it rounds. That
    /// happens once for each element of a tile, at the end: the rounding is the same for all channels and
    /// pixels, and would not average out.
    scale: Vec<f64>,
    /// `A'`: tile to `m`.
    pub output: Matrix,
}

impl Matrices {
    /// The matrices for `m` of 2 or 4.
    pub fn new(m: usize) -> Self {
        let rows = |rows: &[&[f64]]| rows.iter().map(|row| row.to_vec()).collect();
        if m == 2 {
            return Self {
                tile: 4,
                input: rows(&[
                    &[1., 0., -1., 0.],
                    &[0., 1., 1., 0.],
                    &[0., -1., 1., 0.],
                    &[0., 1., 0., -1.],
                ]),
                kernel: rows(&[&[1., 0., 0.], &[1., 1., 1.], &[1., -1., 1.], &[0., 0., 1.]]),
                scale: vec![1., 0.5, 0.5, 1.],
                output: rows(&[&[1., 1., 1., 0.], &[0., 1., -1., -1.]]),
            };
        }
        let [a, b] = POINTS;
        let (aa, bb) = (a * a, b * b);
        // Products of the distances from a point to the others.
        let (zero, near, far) = (aa * bb, 2. * aa * (aa - bb), 2. * bb * (bb - aa));
        Self {
            tile: 6,
            input: rows(&[
                &[aa * bb, 0., -aa - bb, 0., 1., 0.],
                &[0., -a * bb, -bb, a, 1., 0.],
                &[0., a * bb, -bb, -a, 1., 0.],
                &[0., -aa * b, -aa, b, 1., 0.],
                &[0., aa * b, -aa, -b, 1., 0.],
                &[0., aa * bb, 0., -aa - bb, 0., 1.],
            ]),
            kernel: rows(&[
                &[1., 0., 0.],
                &[1., a, aa],
                &[1., -a, aa],
                &[1., b, bb],
                &[1., -b, bb],
                &[0., 0., 1.],
            ]),
            scale: vec![1. / zero, 1. / near, 1. / near, 1. / far, 1. / far, 1.],
            output: rows(&[
                &[1., 1., 1., 1., 1., 0.],
                &[0., a, -a, b, -b, 0.],
                &[0., aa, aa, bb, bb, 0.],
                &[0., aa * a, -aa * a, bb * b, -bb * b, 1.],
            ]),
        }
    }

    /// C declaration of `scale`: the factor of each element of a transformed weight, row by row.
    pub fn scales(&self) -> String {
        let products = self
            .scale
            .iter()
            .flat_map(|a| self.scale.iter().map(move |b| a * b));
        let products: Vec<String> = products.map(|x| format!("{:?}f", x as f32)).collect();
        format!(
            "static const float scale[{}] = {{{}}};\n",
            products.len(),
            products.join(", ")
        )
    }
}

pub(super) fn transposed(matrix: &Matrix) -> Matrix {
    (0..matrix[0].len())
        .map(|col| matrix.iter().map(|row| row[col]).collect())
        .collect()
}

/// C expression of one row of a matrix times the vectors `d0`, `d1`, ...
fn row(coefficients: &[f64]) -> String {
    let mut terms: Vec<(usize, f64)> = coefficients
        .iter()
        .copied()
        .enumerate()
        .filter(|&(_, x)| x != 0.)
        .collect();
    // A term with a factor of one begins the sum, so that all others are multiply-adds.
    terms.sort_by_key(|&(_, x)| (x.abs() != 1., x < 0.));
    let mut sum = String::new();
    for (at, x) in terms {
        sum = match (sum.is_empty(), x) {
            (true, 1.) => format!("d{at}"),
            (true, x) => format!("vf_set1({:?}f) * d{at}", x as f32),
            (false, 1.) => format!("({sum} + d{at})"),
            (false, -1.) => format!("({sum} - d{at})"),
            (false, x) => format!("vf_fma(vf_set1({:?}f), d{at}, {sum})", x as f32),
        };
    }
    sum
}

/// Statements that compute `M X M'` of a square `X` of vectors. `load(j)` is element `[i][j]` for a
/// variable `i`, `before` stands in front of the loads of a row; `store(r, value)` consumes element
/// `[r][j]` for a variable `j`.
pub(super) fn both_sides(
    matrix: &Matrix,
    before: &str,
    load: &dyn Fn(usize) -> String,
    store: &dyn Fn(usize, &str) -> String,
) -> String {
    let (rows, cols) = (matrix.len(), matrix[0].len());
    let mut first = before.to_owned();
    for j in 0..cols {
        first.push_str(&format!("const vf d{j} = {};\n", load(j)));
    }
    for (r, coefficients) in matrix.iter().enumerate() {
        first.push_str(&format!("half[i][{r}] = {};\n", row(coefficients)));
    }
    let mut second = String::new();
    for i in 0..cols {
        second.push_str(&format!("const vf d{i} = half[{i}][j];\n"));
    }
    for (r, coefficients) in matrix.iter().enumerate() {
        second.push_str(&format!("{}\n", store(r, &row(coefficients))));
    }
    format!(
        "vf half[{cols}][{rows}];\nfor (int64_t i = 0; i < {cols}; i++) {{\n{}}}\nfor (int64_t j = 0; j < {rows}; j++) {{\n{}}}\n",
        indent(&first, 4),
        indent(&second, 4)
    )
}
