//! Products of very few rows with a matrix that is contiguous along the depth, such as a row of tokens
//! times a transposed weight.
//!
//! Tiles would spend their time transposing the matrix, which is read only once. Here vectors run along the
//! depth. The few rows are copied to consecutive memory, and each group of columns keeps one accumulator
//! for each row and column, whose lanes are added at the end. The matrix is streamed exactly once, in
//! place.

use super::{At, Axis, GemmSpec, Result, pack};
use crate::isa::Isa;
use crate::kernels::element::Factor;
use crate::kernels::{KernelText, Width, fields, finish_kernel, indent, round_up, run_part, unpack};
use crate::policy::SERIAL_PRODUCT;

/// Most rows.
const MAX_ROWS: usize = 8;

/// Accumulators that leave room for operands.
const ACCUMULATORS: usize = 24;

/// Whether this kernel fits the product.
pub(super) fn fits(spec: &GemmSpec<'_>, isa: Isa) -> bool {
    let lanes = spec.element().lanes(isa);
    (1..=MAX_ROWS).contains(&spec.m)
        && spec.b.contiguous == Some(Axis::Depth)
        && spec.b.segment.is_none()
        && spec.a.segment.is_none()
        && spec.k >= 4 * lanes
        && spec.n >= 4
        && spec.batch > 0
}

/// Whether whole vectors are of pairs of bf16: the few rows are copied as such, and the matrix is memory of
/// them.
fn in_pairs(spec: &GemmSpec<'_>, isa: Isa) -> bool {
    spec.factor(isa) == Factor::Bf16Pair && spec.b.halves.is_some()
}

/// Bytes of working memory: the rows of A, each in whole vectors.
pub(super) fn workspace(spec: &GemmSpec<'_>, isa: Isa) -> usize {
    let row = round_up(spec.k, spec.element().lanes(isa));
    round_up(spec.batch * spec.m * row * spec.element().bytes(), 64)
}

pub(super) fn emit(spec: &GemmSpec<'_>, isa: Isa) -> KernelText {
    let GemmSpec {
        name,
        comment,
        batch,
        m,
        n,
        k,
        a,
        params,
        threads,
        ..
    } = spec;
    let lanes = spec.element().lanes(isa);
    let accumulators = if isa.registers() >= 32 {
        ACCUMULATORS
    } else {
        ACCUMULATORS / 2
    };
    let (real, vf) = (spec.element().ctype(), spec.element().vector());
    let pairs = in_pairs(spec, isa);
    // The type of the copied rows, and how a number or vector of them is stored.
    let (copy, store, rounded) = match pairs {
        true => ("uint16_t", "vf_store_bf16", "bf16_from_sf"),
        false => (real, &*format!("{vf}_store"), ""),
    };
    let columns = (accumulators / m).clamp(1, 4);
    let row = round_up(*k, lanes);
    let groups = ColumnGroups {
        pairs,
        columns,
        full: n / columns,
        rest: n % columns,
        row,
        lanes,
    };

    let element = |width| {
        (a.load)(&At {
            width,
            batch: "batch",
            free: "r",
            depth: "k",
        })
    };
    let vectors = if a.contiguous == Some(Axis::Depth) {
        format!(
            "        for (; k + {lanes} <= {k}; k += {lanes}) {store}(rows + (batch * {m} + r) * {row} + k, {});\n",
            element(Width::Vector)
        )
    } else {
        String::new()
    };
    let finish = if spec.epilogue.code.is_some() {
        super::finish::finish(spec, lanes, true)
    } else {
        String::new()
    };
    let source = format!(
        "/* {comment}\n * {batch} times [{m} x {k}] * [{k} x {n}], vectors along the depth, {columns} columns at a time. */\nstruct {name}_args \
         {{\n{}    char *workspace;\n}};\n/* Copies rows of A. */\nstatic void {name}_rows(void *ctx, int64_t begin, int64_t end, int thread) {{\n    \
         const struct {name}_args *args = ctx;\n{}    {copy} *rows = ({copy} *)args->workspace;\n    for (int64_t unit = begin; unit < end; unit++) \
         {{\n        const int64_t batch = unit / {m}, r = unit % {m};\n        int64_t k = 0;\n{vectors}        for (; k < {k}; k++) rows[(batch * {m} \
         + r) * {row} + k] = {rounded}({});\n    }}\n}}\n{finish}static void {name}_dot(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct \
         {name}_args *args = ctx;\n{}    const {copy} *rows = (const {copy} *)args->workspace;\n    for (int64_t unit = begin; unit < end; unit++) \
         {{\n        const int64_t batch = unit / {units}, group = unit % {units};\n        const {copy} *few = rows + batch * {};\n{}    }}\n}}\n",
        fields(params),
        unpack(params),
        element(Width::Scalar),
        unpack(params),
        m * row,
        indent(&groups.all(spec), 8),
        units = groups.count(),
    );
    let serial = *threads == 1 || 2 * batch * m * n * k < SERIAL_PRODUCT;
    let run = run_part(serial);
    let calls = run_part(true)(&format!("{name}_rows"), batch * m)
        + &run(&format!("{name}_dot"), batch * groups.count());
    finish_kernel(name, params, source, &calls, workspace(spec, isa))
}

/// The columns of the result in groups, each with one accumulator for each row and column.
struct ColumnGroups {
    /// Whether vectors are pairs of bf16.
    pairs: bool,
    /// Columns of a full group.
    columns: usize,
    /// Full groups.
    full: usize,
    /// Columns of the group behind them.
    rest: usize,
    /// Elements between the copied rows of A.
    row: usize,
    /// Elements of a vector.
    lanes: usize,
}

impl ColumnGroups {
    /// How many groups there are.
    fn count(&self) -> usize {
        self.full + usize::from(self.rest > 0)
    }

    /// The products of group `group`: a full one, or the last.
    fn all(&self, spec: &GemmSpec<'_>) -> String {
        let full = self.products(spec, self.columns);
        match (self.full, self.rest) {
            (_, 0) => full,
            (0, rest) => self.products(spec, rest),
            (groups, rest) => format!(
                "if (group < {groups}) {{\n{}}} else {{\n{}}}\n",
                indent(&full, 4),
                indent(&self.products(spec, rest), 4)
            ),
        }
    }

    /// The products of all rows with `some` columns, from `group * columns` on.
    fn products(&self, spec: &GemmSpec<'_>, some: usize) -> String {
        let Self {
            pairs,
            columns,
            row,
            lanes,
            ..
        } = *self;
        let GemmSpec {
            m, k, b, epilogue, ..
        } = spec;
        let (real, vf, sf) = (
            spec.element().ctype(),
            spec.element().vector(),
            spec.element().scalar(),
        );
        let place = |c: usize| format!("(group * {columns} + {c})");
        let load = |width, c: usize| {
            (b.load)(&At {
                width,
                batch: "batch",
                free: &place(c),
                depth: "k",
            })
        };
        let sums: Vec<String> = (0..*m)
            .flat_map(|r| (0..some).map(move |c| format!("sum{r}_{c} = {{0}}")))
            .collect();
        let mut step = String::new();
        let mut tail = String::new();
        let mut end = String::new();
        for c in 0..some {
            let right = match &spec.b.halves {
                Some(memory) if pairs => format!(
                    "const vu column{c} = vu_load((const bf16_pair *)({}));\n",
                    pack::place(memory, &place(c), "k")
                ),
                _ => format!("const {vf} column{c} = {};\n", load(Width::Vector, c)),
            };
            step.push_str(&right);
            tail.push_str(&format!("const {real} column{c} = {};\n", load(Width::Scalar, c)));
        }
        for r in 0..*m {
            for c in 0..some {
                let x = r * row;
                let total = format!("total[{}]", r * some + c);
                let (next, last) = match pairs {
                    true => (
                        format!(
                            "vf_dot_bf16(vu_load((const bf16_pair *)(few + {x} + k)), column{c}, sum{r}_{c})"
                        ),
                        format!("sf_from_bf16(few[{x} + k])"),
                    ),
                    false => (
                        format!("{vf}_fma({vf}_load(few + {x} + k), column{c}, sum{r}_{c})"),
                        format!("few[{x} + k]"),
                    ),
                };
                step.push_str(&format!("sum{r}_{c} = {next};\n"));
                tail.push_str(&format!("{total} = {sf}_fma({last}, column{c}, {total});\n"));
                end.push_str(&format!("total[{}] = {vf}_sum(sum{r}_{c});\n", r * some + c));
            }
        }
        let consume = if epilogue.code.is_some() {
            // The statements for tiles want whole vectors.
            format!(
                "float tile[{}] = {{0}};\nfor (int64_t i = 0; i < {m}; i++)\n    for (int64_t c = 0; c < {some}; c++) tile[i * {lanes} + c] = total[i \
                 * {some} + c];\n{}_finish(args, batch, tile, {lanes}, 0, {m}, group * {columns}, {some});\n",
                m * lanes,
                spec.name
            )
        } else {
            let statements = (epilogue.consume)(&Result {
                width: Width::Scalar,
                batch: "batch",
                row: "i",
                col: "j",
                value: "sum",
            });
            format!(
                "for (int64_t i = 0; i < {m}; i++)\n    for (int64_t c = 0; c < {some}; c++) {{\n        const int64_t j = group * {columns} \
                 + c;\n        {real} sum = total[i * {some} + c];\n{}    }}\n",
                indent(&statements, 8)
            )
        };
        format!(
            "{vf} {};\n{real} total[{}];\nint64_t k = 0;\nfor (; k + {step_width} <= {k}; k += {step_width}) {{\n{}}}\n{end}for (; k < {k}; k++) {{\n{}}}\n{consume}",
            sums.join(", "),
            m * some,
            indent(&step, 4),
            indent(&tail, 4),
            step_width = if pairs { 2 * lanes } else { lanes },
        )
    }
}
