//! Matrix products: `c[b][i][j] = sum over k of a[b][i][k] * b[b][k][j]`, for each batch index, in f32 or
//! f64.
//!
//! Operands of 16 bits become f32 while they are packed, and results are rounded once. Where the machine
//! multiplies pairs of bf16 and both operands hold bf16 numbers, panels hold pairs instead
//! ([`Factor::Bf16Pair`]): two neighbours along the depth, half the bytes and half the instructions. Sums are
//! f32 either way, but the instruction takes subnormal numbers for zero. Where it multiplies tiles of such
//! pairs, larger products do ([`Factor::Bf16Tile`]), and panels are of whole tiles, filled up with zeros.
//!
//! The caller says how an element of each operand is obtained (a strided load, or any expression: an
//! activation, a normalisation, a gather) and how each element of the result is consumed (a store, a bias, an
//! optimizer's whole update). The first is evaluated once for each element, while a panel is packed; the
//! second on a finished tile that is still in L1. Neither operand is ever transposed in memory: packing reads
//! any stride.
//!
//! **Blocking.** The result is cut into tiles of register size ([`super::tile`]): row panels of at most 14
//! rows (of nearly equal height, so that no thin panel is left over) by column panels of two vectors. One
//! operand is *stationary*: packed once, shared by all threads. The other is *streamed*: each thread packs a
//! few of its panels, uses them against all of the stationary operand, and drops them. The smaller operand is
//! stationary, so the larger one is read once from memory and never written back in packed form. Only a very
//! deep product (`k` beyond some thousands) is cut along the depth, with partial sums in the workspace.
//!
//! **Packing or not.** Where a packed element would be used too few times to pay for the copy, tiles read the
//! operand in place with constant strides.
//!
//! Products of very few rows with a matrix that is contiguous along the depth have a kernel of their own
//! ([`dot`]).
//!
//! **Threads.** Threads share the streamed panels or, if the batch is large, whole products. Where tiles of
//! AMX multiply, packing and uneven shares weigh more, and in a deep product of few rows and columns many
//! threads would each read the whole stationary operand for a few rows: there both operands may be packed
//! first, by all threads, which then share blocks of the result (`plan::Blocks`). Of deep products with few
//! results they share slices of the depth ([`deep`]). Each result element is computed by one thread in an
//! order that depends on the shape alone, so the bits do not depend on the thread count.

mod deep;
mod dot;
mod emit;
mod finish;
mod pack;
mod panels;
mod plan;
mod shares;
mod tiles;
mod workspace;

use super::element::{Element, Factor, Storage};
use super::tile::amx;
use super::{KernelText, Param, Width};
use crate::isa::Isa;

/// A dimension of an operand or of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Rows of A, columns of B; of the result, its rows.
    Free,
    /// The summed dimension of an operand; of the result, its columns.
    Depth,
}

/// The place of one element of an operand, or of the first of a vector of elements along the contiguous
/// axis. All are C expressions of type `int64_t`, safe to use as factors.
#[derive(Debug, Clone, Copy)]
pub struct At<'a> {
    /// One element or a vector.
    pub width: Width,
    /// Batch index.
    pub batch: &'a str,
    /// Row of A or column of B.
    pub free: &'a str,
    /// Position along the sum.
    pub depth: &'a str,
}

/// A function from a place to a C expression of that element (`float`) or vector (`vf`).
pub type Load<'a> = Box<dyn Fn(&At<'_>) -> String + 'a>;

/// An operand of a product.
pub struct Operand<'a> {
    /// The axis along which `load` can give vectors, if any.
    pub contiguous: Option<Axis>,
    /// How an element is obtained.
    pub load: Load<'a>,
    /// Set if the operand lies in memory in the type of registers, so that tiles may read it in place.
    pub memory: Option<Memory<'a>>,
    /// Set if the operand lies in memory as bf16, so that pairs are packed without conversion.
    halves: Option<Memory<'a>>,
    /// Whether its elements are bf16 numbers, in whichever type they are held.
    is_bf16: bool,
    /// Set if vectors along the depth must not cross multiples of this.
    segment: Option<usize>,
    /// The type of its elements in registers.
    element: Element,
}

/// Memory that tiles or panels read without conversion.
pub struct Memory<'a> {
    /// C expression (a pointer) of element (0, 0) for a batch index.
    pub base: Box<dyn Fn(&str) -> String + 'a>,
    /// Elements between neighbours along the free axis.
    pub free_stride: i64,
    /// Elements between neighbours along the depth.
    pub depth_stride: i64,
}

impl<'a> Operand<'a> {
    /// The f32 tensor at the C pointer `pointer`, with these strides in elements. `batch` lists extent and
    /// stride of the batch dimensions, outermost first; a stride of 0 broadcasts.
    pub fn strided(pointer: &str, batch: &[(usize, i64)], free_stride: i64, depth_stride: i64) -> Self {
        Self::stored(Storage::F32, pointer, batch, free_stride, depth_stride)
    }

    /// As [`Operand::strided`], for a tensor stored in another way.
    pub fn stored(
        storage: Storage,
        pointer: &str,
        batch: &[(usize, i64)],
        free_stride: i64,
        depth_stride: i64,
    ) -> Self {
        let (pointer, batch) = (pointer.to_owned(), batch.to_vec());
        let base = move |index: &str| match batch_offset(&batch, index) {
            Some(offset) => format!("({pointer} + {offset})"),
            None => pointer.clone(),
        };
        let element = base.clone();
        let load = move |at: &At<'_>| {
            let place = format!(
                "{} + {} * {free_stride} + {} * {depth_stride}",
                element(at.batch),
                at.free,
                at.depth
            );
            storage.load(at.width, &place)
        };
        let is_bf16 = storage == Storage::BF16;
        let memory = || Memory {
            base: Box::new(base),
            free_stride,
            depth_stride,
        };
        let (memory, halves) = match (storage.is_plain(), is_bf16) {
            (true, _) => (Some(memory()), None),
            (_, true) => (None, Some(memory())),
            _ => (None, None),
        };
        Self {
            contiguous: contiguous_axis(free_stride, depth_stride),
            load: Box::new(load),
            memory,
            halves,
            is_bf16,
            segment: None,
            element: storage.element(),
        }
    }

    /// An operand of f32 that is computed while it is packed. `contiguous` is the axis along which `load`
    /// is asked for vectors.
    pub fn computed(contiguous: Option<Axis>, load: impl Fn(&At<'_>) -> String + 'a) -> Self {
        Self {
            contiguous,
            load: Box::new(load),
            memory: None,
            halves: None,
            is_bf16: false,
            segment: None,
            element: Element::F32,
        }
    }
}

impl Operand<'_> {
    /// An operand whose elements are contiguous along the depth only between multiples of `length`, such as
    /// the pixels of several channels-first images. The product is cut there.
    pub fn in_segments(mut self, length: usize) -> Self {
        self.segment = Some(length);
        self
    }

    /// Declares that the elements of a computed operand stand for numbers that would be stored as
    /// `storage`: packing may round them to that.
    pub fn standing_for(mut self, storage: Storage) -> Self {
        self.element = storage.element();
        self.is_bf16 = storage == Storage::BF16;
        self
    }
}

/// The axis with stride 1. The depth is preferred when both qualify, which happens for extents of one only.
fn contiguous_axis(free_stride: i64, depth_stride: i64) -> Option<Axis> {
    match (free_stride, depth_stride) {
        (_, 1) => Some(Axis::Depth),
        (1, _) => Some(Axis::Free),
        _ => None,
    }
}

/// C expression of the offset of batch index `index`, unless it is zero. Index and strides are in row-major
/// order.
pub fn batch_offset(batch: &[(usize, i64)], index: &str) -> Option<String> {
    let mut terms = Vec::new();
    let mut inner: usize = batch.iter().map(|&(extent, _)| extent).product();
    for (position, &(extent, stride)) in batch.iter().enumerate() {
        if extent == 0 {
            return None;
        }
        inner /= extent;
        if stride == 0 || extent == 1 {
            continue;
        }
        let quotient = if inner == 1 {
            index.to_owned()
        } else {
            format!("{index} / {inner}")
        };
        let digit = if position == 0 {
            quotient
        } else {
            format!("({quotient}) % {extent}")
        };
        terms.push(format!("({digit}) * {stride}"));
    }
    (!terms.is_empty()).then(|| format!("({})", terms.join(" + ")))
}

/// A finished element of the result, or a vector of them along the columns. The first three are C
/// expressions of type `int64_t`.
#[derive(Debug, Clone, Copy)]
pub struct Result<'a> {
    /// One element or a vector.
    pub width: Width,
    /// Batch index.
    pub batch: &'a str,
    /// Row.
    pub row: &'a str,
    /// Column.
    pub col: &'a str,
    /// C variable with the sum: `float` or `vf`.
    pub value: &'a str,
}

/// A function from a finished element to the C statements that consume it.
pub type Consume<'a> = Box<dyn Fn(&Result<'_>) -> String + 'a>;

/// Statements of the caller's own for finished tiles. They may use `batch`, `row`, `rows`, `col` and `cols`
/// (the extent of the tile) and declare variables.
#[derive(Debug, Clone, Default)]
pub struct TileCode {
    /// Once for each tile.
    pub tile: String,
    /// Once for each row `i`.
    pub row: String,
    /// For the vector `sum` of results from column `j` on.
    pub vector: String,
    /// For the first `left` lanes of the vector `sum`.
    pub rest: String,
}

/// The consumer of the result.
pub struct Epilogue<'a> {
    /// The axis along which `consume` can take vectors: [`Axis::Depth`] for the columns, [`Axis::Free`] for
    /// the rows. The product is computed transposed where rows are the vectors.
    pub contiguous: Option<Axis>,
    /// Statements for each element or vector. They run in a loop over rows, with columns inside.
    pub consume: Consume<'a>,
    /// Where the result lies if it is only stored: tiles then write it there themselves.
    memory: Option<ResultMemory<'a>>,
    /// Statements for whole tiles, instead of `consume`.
    code: Option<TileCode>,
}

/// A result in memory as registers hold it.
struct ResultMemory<'a> {
    /// C expression (a pointer) of element (0, 0) for a batch index.
    base: Box<dyn Fn(&str) -> String + 'a>,
    row_stride: i64,
    col_stride: i64,
}

impl<'a> Epilogue<'a> {
    /// Stores to the f32 tensor at the C pointer `pointer`, with these strides in elements.
    pub fn store(pointer: &str, batch: &[(usize, i64)], row_stride: i64, col_stride: i64) -> Self {
        Self::store_as(Storage::F32, pointer, batch, row_stride, col_stride)
    }

    /// As [`Epilogue::store`], for a tensor stored in another way.
    pub fn store_as(
        storage: Storage,
        pointer: &str,
        batch: &[(usize, i64)],
        row_stride: i64,
        col_stride: i64,
    ) -> Self {
        let (pointer, batch) = (pointer.to_owned(), batch.to_vec());
        let base = move |index: &str| match batch_offset(&batch, index) {
            Some(offset) => format!("({pointer} + {offset})"),
            None => pointer.clone(),
        };
        let start = base.clone();
        let consume = move |result: &Result<'_>| {
            let place = format!(
                "{} + {} * {row_stride} + {} * {col_stride}",
                start(result.batch),
                result.row,
                result.col
            );
            storage.store(result.width, &place, result.value)
        };
        Self {
            contiguous: contiguous_axis(row_stride, col_stride),
            consume: Box::new(consume),
            memory: storage.is_plain().then(|| ResultMemory {
                base: Box::new(base),
                row_stride,
                col_stride,
            }),
            code: None,
        }
    }

    /// Statements for whole tiles; vectors run along the columns.
    pub fn tiles(code: TileCode) -> Self {
        Self {
            contiguous: Some(Axis::Depth),
            consume: Box::new(|_| String::new()),
            memory: None,
            code: Some(code),
        }
    }

    /// Statements of the caller's own; `contiguous` is the axis along which they can take vectors.
    pub fn custom(contiguous: Option<Axis>, consume: impl Fn(&Result<'_>) -> String + 'a) -> Self {
        Self {
            contiguous,
            consume: Box::new(consume),
            memory: None,
            code: None,
        }
    }
}

/// A matrix product to generate.
pub struct GemmSpec<'a> {
    /// C identifier of the kernel.
    pub name: String,
    /// What it computes, for the comment above it.
    pub comment: String,
    /// Number of products.
    pub batch: usize,
    /// Rows of A and of the result.
    pub m: usize,
    /// Columns of B and of the result.
    pub n: usize,
    /// Length of the sums; zero gives results of zero.
    pub k: usize,
    /// The left operand, `[batch][m][k]`.
    pub a: Operand<'a>,
    /// The right operand, `[batch][k][n]`.
    pub b: Operand<'a>,
    /// The consumer of the result.
    pub epilogue: Epilogue<'a>,
    /// Parameters that the snippets refer to.
    pub params: Vec<Param>,
    /// Most threads the kernel may meet; decides the size of the workspace, never the result.
    pub threads: usize,
}

impl GemmSpec<'_> {
    /// The type that it computes in: that of its operands in registers.
    fn element(&self) -> Element {
        debug_assert_eq!(self.a.element, self.b.element);
        self.a.element
    }

    /// What its panels hold.
    fn factor(&self, isa: Isa) -> Factor {
        let both = self.a.is_bf16 && self.b.is_bf16;
        // A pair must not lie on both sides of a cut.
        let whole = [&self.a, &self.b]
            .iter()
            .all(|operand| operand.segment.is_none_or(|length| length.is_multiple_of(2)));
        if !isa.has_bf16_pairs() || !both || !whole || self.k <= 1 {
            return self.element().into();
        }
        // Fewer rows, columns or steps than half a tile leave more of it empty than it gains.
        let cut_in_tiles = [&self.a, &self.b].iter().all(|operand| {
            let steps = Factor::Bf16Tile.depth() * Factor::Bf16Tile.steps();
            operand.segment.is_none_or(|length| length.is_multiple_of(steps))
        });
        let large = self.m.min(self.n) > amx::EXTENT / 2 && self.k >= amx::EXTENT;
        match isa.has_tiles() && cut_in_tiles && large {
            true => Factor::Bf16Tile,
            false => Factor::Bf16Pair,
        }
    }
}

/// Generates the kernel.
pub fn emit(spec: GemmSpec<'_>, isa: Isa) -> KernelText {
    let spec = columns_contiguous(spec);
    if dot::fits(&spec, isa) {
        dot::emit(&spec, isa)
    } else {
        emit::emit(&spec, isa)
    }
}

/// Bytes of working memory of the kernel that [`emit`] would write, from its plan. Only the memory layout
/// of operands and epilogue counts; their functions may be missing.
pub fn workspace(spec: GemmSpec<'_>, isa: Isa) -> usize {
    let spec = columns_contiguous(spec);
    if dot::fits(&spec, isa) {
        dot::workspace(&spec, isa)
    } else {
        workspace::bytes(&spec, isa)
    }
}

/// Exchanges the operands where the rows of the result are contiguous and not its columns (or only the rows
/// are long enough for a vector): `c` transposed is `b` transposed times `a` transposed.
fn columns_contiguous(spec: GemmSpec<'_>) -> GemmSpec<'_> {
    if spec.epilogue.contiguous != Some(Axis::Free) {
        return spec;
    }
    let GemmSpec {
        name,
        comment,
        batch,
        m,
        n,
        k,
        a,
        b,
        epilogue,
        params,
        threads,
    } = spec;
    let inner = epilogue.consume;
    let memory = epilogue.memory.map(|memory| ResultMemory {
        base: memory.base,
        row_stride: memory.col_stride,
        col_stride: memory.row_stride,
    });
    let consume = move |r: &Result<'_>| {
        inner(&Result {
            row: r.col,
            col: r.row,
            ..*r
        })
    };
    let epilogue = Epilogue {
        contiguous: Some(Axis::Depth),
        consume: Box::new(consume),
        memory,
        code: None,
    };
    GemmSpec {
        name,
        comment,
        batch,
        m: n,
        n: m,
        k,
        a: b,
        b: a,
        epilogue,
        params,
        threads,
    }
}
