//! Products of 16 bits by Kiln's own template for Hopper (`kernels/product/warpgroups.cuh`), with what
//! follows them.
//!
//! Alone, a product of this template is an alternative to cuBLASLt's, and the device times both ([`Trial`]).
//! Its point is what follows: a nest that needs one element of the product for each of its own
//! ([`kiln_compiler::schedule::epilogue`]) is computed by warps of its own while others multiply for the next
//! tile, so that the result reaches no memory and the nest's traffic is hidden behind arithmetic.

use std::fmt::Write as _;

use kiln_compiler::products::Cut;
use kiln_compiler::schedule::epilogue::{self, BATCH, COL, ROW, ResultFrame};
use kiln_compiler::schedule::nest::Nest;
use kiln_compiler::schedule::{Buffer, Kernel};
use kiln_graph::{Graph, Node, Op};

use super::case::{Case, DEPTH, NEIGHBOURS, TILE_CLOCKS, TILE_ROWS, WIDEST_KEPT, WIDTHS, WIDTHS_WITH_NEST};
use super::pieces::Pieces;
use super::{Frame, matrices};
use crate::code::{Boxes, Copied, FunctionText, Trial, Windows};
use crate::emit::after::Role;
use crate::emit::convolution::windows::InWindows;
use crate::emit::nest::epilogue::{Keep, Loops, Statements, generate as statements};
use crate::emit::{
    Argument, Call, EmitOptions, KernelCode, Launch, PaddedProduct, ProductCall, convolution, nest,
};
use crate::kernels::product::{WARPGROUP_TEMPLATES, instructions};
use crate::products::{Epilogue, Number, Product, ScalarsFrom};

/// The capability that has these instructions. They are none of a later one.
pub const CAPABILITY: (u32, u32) = (9, 0);

/// Which products the template computes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Warpgroups {
    /// Those with a nest behind them, and those alone that are faster than the library's.
    #[default]
    WherePays,
    /// All that it can, however small: for tests.
    Always,
    /// None: for tests on a machine without a GPU.
    Never,
}

/// Rows that a finishing thread has at a time: what they need besides the product is under way together.
const TOGETHER: u64 = 4;
/// Least products alone that the template is tried on: smaller ones end before its parts are all at work.
const LEAST_FLOP: f64 = 1e9;

/// Whether the template computes `product`, with its operands and its result so many bytes behind the start
/// of their buffers: one of two matrices whose rows begin at multiples of sixteen bytes.
fn is_taken(product: &Product, starts: [usize; 3]) -> bool {
    let half = |number: Number| matches!(number, Number::F16 | Number::Bf16);
    let result = product.result.number;
    let extents = [product.m, product.n, product.k];
    half(product.left.number)
        && product.right.number == product.left.number
        && (result == product.left.number || result == Number::F32)
        && product.batch == 1
        && product.scalars == ScalarsFrom::Product
        && product.epilogue == Epilogue::None
        && product.n.is_multiple_of(NEIGHBOURS)
        && [
            product.left.leading,
            product.right.leading,
            product.result.leading,
        ]
        .iter()
        .all(|leading| leading.is_multiple_of(NEIGHBOURS))
        && starts.iter().all(|start| start.is_multiple_of(16))
        && extents.iter().all(|&extent| extent > 0 && extent < 1 << 30)
}

/// The name of a type of 16 bits in the template, and in its instructions.
fn element(number: Number) -> (&'static str, &'static str) {
    match number {
        Number::F16 => ("kiln_f16", "f16"),
        _ => ("kiln_bf16", "bf16"),
    }
}

/// The matrices of a product as the copy engine takes them, tile by tile.
fn boxes(product: &Product, [rows, columns]: [u64; 2]) -> [Boxes; 2] {
    let Product {
        m, n, k, left, right, ..
    } = product;
    // A turned operand comes in blocks of 64 of its rows (or columns).
    let of = |inner: u64, outer: u64, leading: u64, tall: u64| Boxes {
        number: left.number,
        inner,
        outer,
        leading,
        wide: DEPTH as u32,
        tall: tall as u32,
    };
    [
        match left.transposed {
            true => of(*m, *k, left.leading, DEPTH),
            false => of(*k, *m, left.leading, rows),
        },
        match right.transposed {
            true => of(*k, *n, right.leading, columns),
            false => of(*n, *k, right.leading, DEPTH),
        },
    ]
}

/// Whether the matrices of `call` are those of `frame`, and not turned.
fn lies(call: &ProductCall, frame: &Frame) -> bool {
    let extents = [&frame.rows, &frame.columns].map(|dims| frame.extent(dims) as u64);
    call.left.0 == Buffer::Value(frame.left.0) && [call.product.m, call.product.n] == extents
}

/// A product whose operands the template reads, whole or in pieces.
struct Operands {
    /// All of it.
    product: Product,
    /// The product of each piece, with where its operands and its result are; one if nothing is in pieces.
    pieces: Vec<ProductCall>,
    cut: Option<Cut>,
    /// What the rows of the left operand are windows of, if they are.
    windows: Option<InWindows>,
}

impl Operands {
    fn whole(call: &ProductCall) -> Self {
        Self {
            product: call.product.clone(),
            pieces: vec![call.clone()],
            cut: None,
            windows: None,
        }
    }

    fn in_windows(windows: InWindows) -> Self {
        Self {
            windows: Some(windows.clone()),
            ..Self::whole(&windows.call)
        }
    }

    /// The product of `pieces`; none if they are not alike, or turned from what the graph says.
    fn of(pieces: &Pieces, tf32: bool) -> Option<Self> {
        let calls = pieces.calls(tf32)?;
        let first = calls.first()?.clone();
        let mut product = first.product.clone();
        for call in &calls[1..] {
            match pieces.cut {
                Cut::Rows => product.m += call.product.m,
                Cut::Columns => product.n += call.product.n,
                Cut::Depth => product.k += call.product.k,
            }
        }
        let is_alike = |call: &ProductCall| {
            let [own, other] = [call, &first].map(|call| &call.product);
            (own.left.transposed, own.right.transposed) == (other.left.transposed, other.right.transposed)
                && (own.result, own.scalars, &own.epilogue) == (other.result, other.scalars, &other.epilogue)
        };
        let fits = calls
            .iter()
            .zip(&pieces.frames)
            .all(|(call, frame)| lies(call, frame))
            && calls.iter().all(is_alike);
        fits.then_some(Self {
            product,
            pieces: calls,
            cut: Some(pieces.cut),
            windows: None,
        })
    }

    /// Where a kernel of the graph finds the product `node`.
    fn new(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<Self> {
        if let Some(pieces) = Pieces::new(graph, kernel, node, options.layouts) {
            return Self::of(&pieces, options.tf32);
        }
        if !matches!(graph.node(node).op, Op::DotGeneral(_)) {
            return match convolution::product(graph, kernel, node, options) {
                Some(call) => Some(Self::whole(&call)),
                None => convolution::in_windows(graph, kernel, node, options).map(Self::in_windows),
            };
        }
        let frame = Frame::new(graph, kernel, node, options.layouts)?;
        let [call] = &matrices::calls(&frame, options.tf32)?[..] else {
            return None;
        };
        lies(call, &frame).then(|| Self::whole(call))
    }

    /// Whether the template computes it, if the result begins `start` bytes behind its buffer's.
    fn are_taken(&self, start: impl Fn(&ProductCall) -> usize) -> bool {
        let takes = |call: &ProductCall| is_taken(&call.product, [call.left.1, call.right.1, start(call)]);
        self.pieces.iter().all(takes)
    }

    /// The left operand (0) or the right one (1) of `call`, one of the pieces, as the copy engine takes it.
    fn copied(&self, call: &ProductCall, side: usize, tile: [u64; 2]) -> Copied {
        let boxes = boxes(&call.product, tile)[side];
        match (&self.windows, side) {
            (None, _) => Copied::Matrix(boxes),
            (Some(windows), 0) => Copied::Image(Windows {
                tall: tile[0] as u32,
                ..windows.image
            }),
            (Some(windows), _) => Copied::Matrix(match windows.mirrored {
                // All taps side by side, and the depth of one.
                true => Boxes {
                    inner: call.product.n * windows.taps(),
                    outer: windows.channels as u64,
                    ..boxes
                },
                false => boxes,
            }),
        }
    }

    /// The launch that makes the copy of a weight that the template reads, behind so much working memory, and
    /// all of that; none if the copy cannot be made.
    fn copy_behind(&mut self, scratch: usize) -> Option<(Option<Launch>, usize)> {
        match self.windows.as_mut().and_then(|windows| windows.copy.as_mut()) {
            Some(copy) => {
                let (launch, scratch) = copy.behind(scratch)?;
                Some((Some(launch), scratch))
            }
            None => Some((None, scratch)),
        }
    }

    /// The extents of the pieces along the cut.
    fn extents(&self) -> impl Iterator<Item = u64> {
        let extent = |call: &ProductCall| match self.cut {
            Some(Cut::Columns) => call.product.n,
            Some(Cut::Depth) => call.product.k,
            _ => call.product.m,
        };
        self.pieces.iter().map(extent)
    }

    /// The width whose tiles take the least time on so many multiprocessors, and lie in one piece each; none
    /// if no tile does.
    fn columns(&self, widths: [(u64, f64); 3], processors: u32) -> Option<u64> {
        let product = &self.product;
        let steps = product.k.div_ceil(DEPTH) as f64;
        let clocks = |&(columns, step): &(u64, f64)| {
            let tiles = product.m.div_ceil(TILE_ROWS) * product.n.div_ceil(columns);
            tiles.div_ceil(u64::from(processors.max(1))) as f64 * (steps * step + TILE_CLOCKS)
        };
        let widths = widths
            .into_iter()
            .filter(|&(columns, _)| self.lies_in_tiles(TILE_ROWS, columns));
        let best = widths.min_by(|a, b| clocks(a).total_cmp(&clocks(b)));
        best.map(|(columns, _)| columns)
    }

    /// The tiles that take the least time on so many multiprocessors: those of products without sums behind
    /// them.
    fn tiles(&self, widths: [(u64, f64); 3], finishes: bool, processors: u32) -> Option<Case> {
        let product = &self.product;
        if self.windows.is_some() && product.n <= WIDEST_KEPT {
            return Some(Case::fitted(product, finishes));
        }
        let columns = self.columns(widths, processors)?;
        Some(Case::plain(product, columns, finishes))
    }

    /// The same of a product that nothing follows.
    fn tiles_alone(&self, processors: u32) -> Option<Case> {
        self.tiles(WIDTHS, self.product.result.number != Number::F32, processors)
    }

    /// Whether tiles of so many rows and columns lie in one piece each.
    fn lies_in_tiles(&self, rows: u64, columns: u64) -> bool {
        let unit = match self.cut {
            Some(Cut::Rows) => rows,
            Some(Cut::Columns) => columns,
            Some(Cut::Depth) | None => return true,
        };
        self.extents().all(|extent| extent.is_multiple_of(unit))
    }

    /// The steps of the depth that all tiles of a column take: those of each piece begin anew.
    fn reach(&self) -> u64 {
        match self.cut {
            Some(Cut::Depth) => self.extents().map(|extent| extent.next_multiple_of(DEPTH)).sum(),
            _ => self.product.k,
        }
    }
}

/// An operand in the kernel's text: parameters, arguments, and the statement that declares its pieces as
/// `name`.
struct Declared {
    parameters: Vec<String>,
    arguments: Vec<Argument>,
    statement: String,
}

/// Declares the left operand (0) or the right one (1).
fn declared(operands: &Operands, side: usize, tile: [u64; 2]) -> Declared {
    let name = ["left", "right"][side];
    let in_pieces = match operands.cut {
        Some(Cut::Rows) => side == 0,
        Some(Cut::Columns) => side == 1,
        Some(Cut::Depth) => true,
        None => false,
    };
    let count = if in_pieces { operands.pieces.len() } else { 1 };
    let mut own = Declared {
        parameters: Vec::new(),
        arguments: Vec::new(),
        statement: String::new(),
    };
    let (mut names, mut starts) = (Vec::new(), Vec::new());
    let mut start = 0;
    for ((number, call), extent) in operands
        .pieces
        .iter()
        .enumerate()
        .zip(operands.extents())
        .take(count)
    {
        let parameter = if count > 1 {
            format!("{name}{number}")
        } else {
            name.to_owned()
        };
        let (buffer, bytes) = [call.left, call.right][side];
        let place = match operands
            .windows
            .as_ref()
            .and_then(|windows| windows.copy.as_ref())
        {
            Some(copy) if side == 1 => Argument::Scratch(copy.at),
            _ => Argument::Part(buffer, bytes),
        };
        own.arguments.push(Argument::Copied(
            Box::new(place),
            operands.copied(call, side, tile),
        ));
        own.parameters
            .push(format!("const __grid_constant__ kiln_matrix {parameter}"));
        names.push(format!("&{parameter}"));
        starts.push(start.to_string());
        start += match operands.cut {
            Some(Cut::Depth) => extent.next_multiple_of(DEPTH),
            _ => extent,
        };
    }
    own.statement = format!(
        "const kiln_product_pieces<{count}> {name}s = {{ {{ {} }}, {{ {} }} }};\n",
        names.join(", "),
        starts.join(", ")
    );
    own
}

/// What the warps that finish do, or those that multiply where none finish.
struct Finish {
    /// Declarations in front of the kernel.
    helpers: String,
    /// What is in the last parameter of `kiln_product_multiply`.
    store: String,
    /// The statements of the warps that finish.
    finish: String,
    parameters: Vec<String>,
    arguments: Vec<Argument>,
}

/// The launch of a product of `case`.
fn launch(operands: &Operands, case: Case, processors: u32, finish: Finish) -> Launch {
    let product = &operands.product;
    let (element, instruction) = element(product.left.number);
    let mut helpers = format!(
        "{WARPGROUP_TEMPLATES}struct @_case {{\ntypedef {element} element;\n\
         static constexpr int TILE_ROWS = {}, TILE_COLUMNS = {}, STAGES = {}, GROUPS = {}, FINISHERS = {}, RESULTS = {};\n\
         static constexpr int PIECES_KEPT = {}, RIGHT_STEPS = {};\n\
         static constexpr bool LEFT_TURNED = {}, RIGHT_TURNED = {}, DEPTH_IN_PIECES = {}, KEEPS_COLUMNS = {}, IN_WINDOWS = {};\n{}{}}};\n",
        case.rows,
        case.columns,
        case.stages(),
        case.groups,
        case.finishers(),
        case.result_tiles(),
        case.pieces_kept,
        case.right_steps,
        product.left.transposed,
        case.right_turned,
        operands.cut == Some(Cut::Depth),
        case.keeps_columns,
        operands.windows.is_some(),
        operands
            .windows
            .as_ref()
            .map_or_else(String::new, InWindows::constants),
        instructions(case.columns as usize, instruction),
    );
    helpers.push_str(&finish.helpers);
    let [left, right] = [0, 1].map(|side| declared(operands, side, [case.rows, case.columns]));
    let registers = |side: usize, direction: &str| match case.registers() {
        None => String::new(),
        Some(counts) => format!(
            "asm volatile(\"setmaxnreg.{direction}.sync.aligned.u32 {};\");\n",
            counts[side]
        ),
    };
    let [fewer, more] = [registers(0, "dec"), registers(1, "inc")];
    let mut body = format!(
        "const kiln_product_shared<@_case> shared;\nconst kiln_product_size size = {{ {}, {}, {} }};\n\
         if (threadIdx.x >= 128 && threadIdx.x < {}) {{\n{fewer}\
         kiln_product_multiply<@_case>(size, shared, [&](int row, int column, float first, float second) {{ {} }});\n\
         }} else {{\n{more}if (threadIdx.x < 32) {{\n{}{}kiln_product_load<@_case>(lefts, rights, size, shared);\n}}",
        product.m,
        product.n,
        operands.reach(),
        case.behind_groups(),
        finish.store,
        left.statement,
        right.statement,
    );
    if case.finishes {
        let _ = write!(body, " else {{\n{}}}", finish.finish);
    }
    body.push_str("\n}");
    let arguments = [left.arguments, right.arguments, finish.arguments].concat();
    let parameters = [left.parameters, right.parameters, finish.parameters].concat();
    Launch {
        text: FunctionText {
            helpers,
            parameters,
            body,
            // A tile of 256 leaves warps 1 to 3 to finish, behind those that multiply there are none.
            threads: case.threads() as u32,
            device_only: true,
            blocks: 1,
        },
        grid: [case.blocks(product, processors) as u32, 1, 1],
        shared_bytes: case.shared_bytes() as u32,
        role: Role::Alone,
        arguments,
    }
}

/// Where a finishing thread has what it asked for.
fn queue(case: Case) -> String {
    match case.ahead {
        0 => "kiln_next_turn<@_loaded>()".to_owned(),
        bytes => format!(
            "kiln_turns_ahead<@_loaded, {}, {bytes}>(shared.ahead, kiln_product_finisher<@_case>(), {})",
            case.turns,
            case.finishers()
        ),
    }
}

/// The loop over the rows that a finishing thread has at a time, with `statements` for each of them: in row
/// `k`, `product` is the result, and `row_name` the row.
fn each_row(ty: &str, row_name: &str, together: i64, statements: &str) -> String {
    format!(
        "#pragma unroll\nfor (int k = 0; k < {together}; k++) {{\n\
         const int line = down + shared.LINES * k;\nconst {ty} {row_name} = row + shared.LINES * k;\n\
         if (line >= shared.TILE_ROWS || {row_name} >= size.rows) break;\n\
         const auto product = shared.at(tile, line, across);\n{statements}}}\n"
    )
}

/// The product alone, by tiles of `case`.
fn alone(operands: &Operands, case: Case, processors: u32) -> Launch {
    let product = &operands.product;
    let leading = product.result.leading;
    let (result, start) = operands.pieces[0].result;
    let arguments = vec![Argument::Part(result, start)];
    let finish = match case.finishes {
        true => {
            let (element, _) = element(product.left.number);
            let store = format!("product.store(result + own * (kiln_u64){leading} + column);\n");
            let rows = each_row("int", "own", TOGETHER as i64, &store);
            Finish {
                helpers: "struct @_loaded {};\n".into(),
                store: String::new(),
                finish: format!(
                    "const auto load = [](@_loaded&, int, int, int) {{}};\n\
                     const auto points = [&](const @_loaded&, int tile, int down, int across, int row, int column) {{\n{rows}}};\n\
                     kiln_product_finish<@_case, {TOGETHER}, @_loaded>(size, shared, {}, load, points, [] {{}});\n",
                    queue(case)
                ),
                parameters: vec![format!("{element}* result")],
                arguments,
            }
        }
        false => Finish {
            helpers: String::new(),
            store: format!(
                "*(float2*)(result + row * (kiln_u64){leading} + column) = make_float2(first, second);"
            ),
            finish: String::new(),
            parameters: vec!["float* result".into()],
            arguments,
        },
    };
    launch(operands, case, processors, finish)
}

/// Whether the template may compute products alone here, of so many operations.
fn is_tried(flop: f64, options: &EmitOptions<'_>) -> bool {
    let tried = match options.warpgroups {
        Warpgroups::WherePays => flop >= LEAST_FLOP,
        Warpgroups::Always => true,
        Warpgroups::Never => false,
    };
    tried && options.capability == CAPABILITY
}

/// What the device times for `product`.
fn trial(product: &Product, options: &EmitOptions<'_>) -> Trial {
    Trial {
        product: product.clone(),
        always: options.warpgroups == Warpgroups::Always,
    }
}

/// The launch that computes a product in pieces, if the template does, and what it is timed as.
pub(super) fn of_pieces(pieces: &Pieces, options: &EmitOptions<'_>) -> Option<(Launch, Trial)> {
    let operands = Operands::of(pieces, options.tf32)?;
    let product = &operands.product;
    // The parts of the result begin where its tiles do.
    if !is_tried(product.flop(), options) || !operands.are_taken(|call| call.result.1) {
        return None;
    }
    let case = operands.tiles_alone(options.processors)?;
    let own = alone(&operands, case, options.processors);
    Some((own, trial(product, options)))
}

/// The call with the template as the alternative that the device times, where it has one.
pub(super) fn offered(call: ProductCall, options: &EmitOptions<'_>) -> Call {
    let operands = Operands::whole(&call);
    let product = &call.product;
    let case = operands.tiles_alone(options.processors);
    match case.filter(|_| is_tried(product.flop(), options) && operands.are_taken(|call| call.result.1)) {
        Some(case) => {
            let own = alone(&operands, case, options.processors);
            let trial = trial(product, options);
            Call::Either(
                vec![Call::Product(Box::new(call))],
                vec![Call::Launch(own)],
                Some(Box::new(trial)),
            )
        }
        None => Call::Product(Box::new(call)),
    }
}

/// The convolution that `code` computes, with the template as the alternative that the device times, where it
/// has one.
pub fn beside(code: KernelCode, windows: InWindows, options: &EmitOptions<'_>) -> KernelCode {
    let mut operands = Operands::in_windows(windows);
    let is_taken = is_tried(operands.product.flop(), options) && operands.are_taken(|call| call.result.1);
    let case = operands.tiles_alone(options.processors).filter(|_| is_taken);
    let (Some(case), Some((copy, scratch))) = (case, operands.copy_behind(0)) else {
        return code;
    };
    let own = alone(&operands, case, options.processors);
    let trial = trial(&operands.product, options);
    let own = copy.into_iter().chain([own]).map(Call::Launch).collect();
    KernelCode {
        scratch: scratch.max(code.scratch),
        calls: vec![Call::Either(code.calls, own, Some(Box::new(trial)))],
    }
}

/// What those who finish may have.
#[derive(Clone, Copy)]
struct Way {
    /// Whether one group multiplies, so that more finish.
    one_group: bool,
    /// So many rows at a time ahead in shared memory, or none.
    ahead: Option<u64>,
}

/// The product `node` with `nest` behind it; none if the template does not compute it, or would leave most
/// of the device idle.
fn together(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    nest: &Nest,
    options: &EmitOptions<'_>,
) -> Option<KernelCode> {
    if options.warpgroups == Warpgroups::Never || options.capability != CAPABILITY {
        return None;
    }
    let value = graph.node(node).outputs[0];
    let mut operands = Operands::new(graph, kernel, node, options)?;
    let product = &operands.product;
    let result = ResultFrame::of(graph, value)?;
    let placed = result.place(graph, nest, value, nest.maps.get(&value)?);
    let [1, rows, column_count] = result.extents[..] else {
        return None;
    };
    let along = epilogue::vector_variable(graph, &placed, value, &[COL]);
    if (product.m, product.n) != (rows as u64, column_count as u64)
        || along != Some(COL)
        || product.result.number == Number::F32
        || !operands.are_taken(|_| 0)
    {
        return None;
    }
    let keeps_columns = !placed.late.is_empty();
    let shaped = |way: Way| {
        let has_ahead = way.ahead.is_some();
        let mut case = match keeps_columns {
            true if way.one_group => Case::of_one_group(product).filter(|_| operands.cut.is_none())?,
            true => Case::with_sums(product, has_ahead),
            false => operands.tiles(WIDTHS_WITH_NEST, true, options.processors)?,
        };
        let together = case.together(way.ahead.unwrap_or(TOGETHER)) as i64;
        let [_, across] = case.tiles(product);
        let mut loops = Loops {
            row: (ROW, together),
            column: (COL, NEIGHBOURS as i64),
            ahead: has_ahead,
            keeps_pieces: keeps_columns,
            keep: Keep {
                blocks: case.blocks_down(product) as i64,
                across: across as i64,
                longest: case.rows_of_block(product).div_ceil(case.lines()) as i64,
            },
        };
        let mut nest = statements(graph, &placed, value, loops);
        if !case.keeps_pieces(nest.pieces_kept as u64, has_ahead) {
            loops.keeps_pieces = false;
            nest = statements(graph, &placed, value, loops);
        }
        case.pieces_kept = nest.pieces_kept as u64;
        if has_ahead {
            case = case.with_turns(nest.loaded_bytes as u64);
        }
        let fits = case.stages() >= case.least_stages() && operands.lies_in_tiles(case.rows, case.columns);
        fits.then_some((case, nest, together))
    };
    let way = |ahead: Option<u64>| Way {
        one_group: false,
        ahead,
    };
    // Tiles of few rows have rounds of one row: the last of more would be over before it is full.
    let one_group = Way {
        one_group: true,
        ahead: Some(1),
    };
    let ways: &[Way] = match keeps_columns && epilogue::streams(graph, &placed, value) > 1 {
        true => &[one_group, way(Some(TOGETHER / 2)), way(Some(1)), way(None)],
        false => &[way(None)],
    };
    let (case, nest, together) = ways.iter().find_map(|&way| shaped(way))?;
    let finish = finish(&nest, case, together);
    let (copy, scratch) = operands.copy_behind(nest.scratch)?;
    let product = launch(&operands, case, options.processors, finish);
    Some(KernelCode {
        calls: copy
            .into_iter()
            .chain([product])
            .chain(nest.sums)
            .map(Call::Launch)
            .collect(),
        scratch,
    })
}

/// The warps that finish, with the statements of a nest.
fn finish(nest: &Statements, case: Case, together: i64) -> Finish {
    let Statements {
        index,
        top,
        load,
        shared,
        points,
        tile,
        end,
        ..
    } = nest;
    let members: String = nest
        .loaded
        .iter()
        .map(|(declaration, _)| format!("{declaration}\n"))
        .collect();
    let names = |constant: &str| -> String {
        let each = nest
            .loaded
            .iter()
            .map(|(_, name)| format!("{constant}auto& {name} = loaded.{name};\n"));
        each.collect()
    };
    let [to, from] = [names(""), names("const ")];
    let rows = each_row(index, &format!("i{ROW}"), together, points);
    // There is one matrix, so nothing varies with its number.
    debug_assert!(!points.contains(&format!("i{BATCH} ")) && !load.contains(&format!("i{BATCH} ")));
    Finish {
        helpers: format!("struct @_loaded {{\n{members}}};\n"),
        store: String::new(),
        finish: format!(
            "{top}const auto load = [&](@_loaded& loaded, int k, {index} i{ROW}, {index} i{COL}) {{\n{to}{load}}};\n\
             const auto points = [&](const @_loaded& loaded, int tile, int down, int across, {index} row, {index} i{COL}) {{\n{from}{shared}{rows}}};\n\
             const auto behind = [&] {{\n{tile}}};\n\
             kiln_product_finish<@_case, {together}, @_loaded>(size, shared, {}, load, points, behind);\n{end}",
            queue(case)
        ),
        parameters: nest.parameters.clone(),
        arguments: nest.arguments.clone(),
    }
}

/// The code of the product `node` with `nest` behind it.
pub fn with_nest(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    nest: &Nest,
    options: &EmitOptions<'_>,
) -> Option<KernelCode> {
    together(graph, kernel, node, nest, options)
        .or_else(|| one_after_the_other(graph, kernel, node, nest, options))
}

/// The product, then the nest, which reads it from where it is stored or from working memory.
fn one_after_the_other(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    nest: &Nest,
    options: &EmitOptions<'_>,
) -> Option<KernelCode> {
    let value = graph.node(node).outputs[0];
    let buffer = Buffer::Value(value);
    let mut product = match graph.node(node).op {
        Op::DotGeneral(_) => super::generate(graph, kernel, node, options)?,
        _ => convolution::generate(graph, kernel, node, options)?,
    };
    let mut behind = nest.clone();
    behind.members.retain(|&member| member != node);
    behind.drop_store(value);
    behind.add_use(value, nest.maps.get(&value)?.clone());
    let mut behind = nest::generate(graph, &behind, options);
    let mut scratch = product.scratch.max(behind.scratch);
    if !kernel.writes.contains(&buffer) {
        let at = scratch.next_multiple_of(256);
        scratch = at + graph.ty(value).bytes();
        for call in product.calls.iter_mut().chain(&mut behind.calls) {
            in_working_memory(call, buffer, at);
        }
    }
    product.calls.append(&mut behind.calls);
    Some(KernelCode {
        calls: product.calls,
        scratch,
    })
}

/// Lets a call find `buffer` at byte `at` of working memory.
pub(super) fn in_working_memory(call: &mut Call, buffer: Buffer, at: usize) {
    match call {
        Call::Product(product) if product.result.0 == buffer => {
            let copies = [None, None, Some(at + product.result.1)];
            let product = ProductCall::clone(product);
            *call = Call::Padded(Box::new(PaddedProduct {
                call: product,
                copies,
            }));
        }
        Call::Padded(padded) if padded.call.result.0 == buffer && padded.copies[2].is_none() => {
            padded.copies[2] = Some(at + padded.call.result.1);
        }
        Call::Launch(launch) => {
            for argument in &mut launch.arguments {
                match *argument {
                    Argument::Buffer(own) if own == buffer => *argument = Argument::Scratch(at),
                    Argument::Part(own, bytes) if own == buffer => *argument = Argument::Scratch(at + bytes),
                    _ => {}
                }
            }
        }
        Call::Convolution(convolution) => {
            for (argument, _) in &mut convolution.tensors {
                if *argument == Argument::Buffer(buffer) {
                    *argument = Argument::Scratch(at);
                }
            }
        }
        Call::Either(library, own, _) => {
            library
                .iter_mut()
                .chain(own)
                .for_each(|call| in_working_memory(call, buffer, at));
        }
        _ => {}
    }
}
