//! Nests that reduce rows: softmax, normalisations, losses.
//!
//! A *group* of threads has a row: 1 to 32 threads of a warp, or the whole block. Each thread takes every
//! so-many-th item of the row, an item being `width` neighbours. A row is gone over in passes ([`Pass`]):
//! each accumulates the reductions whose operands are known by then, combines them over the group, and so
//! makes the operands of the next. If the items of a thread are few, the loop over them is unrolled and what
//! several passes need stays in registers; longer rows are read again. Where the variable that is contiguous
//! in memory numbers rows, a group is one thread, and neighbouring threads have neighbouring rows.
//!
//! With late reductions each block has a chunk of rows, one after the other, and accumulates the late results
//! beside them.

use kiln_compiler::index::Index;
use kiln_compiler::schedule::nest::{Store, vars};
use kiln_graph::op::{Op, ReduceOp};
use kiln_graph::{DType, Graph, Node, Value};
use rustc_hash::FxHashSet;

use super::late::{Late, Partials};
use super::shape::{FILL, Shape, shape};
use super::space::{Lanes, Seen, Space};
use super::writer::{Key, Place, Register, Writer};
use super::{Argument, Launch, Role, c, ceil, coordinates, grid};
use crate::code::FunctionText;

/// Terms of the longest sum of f32 that one accumulator takes; longer ones are cut into blocks of [`BLOCK`],
/// which add up in f64.
const LONGEST: i64 = 128;
const BLOCK: i64 = 64;

/// A row reduction being accumulated.
struct Sum {
    name: String,
    value: Value,
    x: Value,
    index: Vec<Index>,
    op: ReduceOp,
    dtype: DType,
}

/// One pass over a row.
struct Pass {
    sums: Vec<Sum>,
    stores: Vec<Store>,
    lates: Vec<Late>,
}

/// The indices of the kernel.
pub(super) fn seen(graph: &Graph, space: &Space) -> Vec<Seen> {
    dry_run(graph, space, FxHashSet::default()).seen
}

/// A dry run: writes a row whose passes keep the values `kept` for later ones, and returns the writer,
/// which has noted the indices and evaluated values.
pub(super) fn dry_run<'a>(graph: &'a Graph, space: &'a Space, kept: FxHashSet<Key>) -> Writer<'a> {
    let shape = Shape {
        group: 1,
        threads: 32,
        items: 1,
        turns: 1,
        unrolled: false,
        paired: false,
        rows: 1,
        each: 1,
        late: false,
    };
    let mut writer = Writer::new(graph, space);
    writer.kept.keys = kept;
    let lates = writer.lates();
    row(&mut writer, &shape, &lates, &[]);
    writer
}

/// The shape, and what passes keep. Where several warps would have a row, one has it if it can with half the
/// neighbours at a time and no thread idle: warps wait for each other at each reduction. The gradient of
/// layer norm of 12,608 rows of 384 takes 18 us in place of 26 (bf16, H100).
fn choose_shape(graph: &Graph, space: &mut Space) -> (Shape, FxHashSet<Key>) {
    let (wide, kept) = shape(graph, space);
    if wide.unrolled && wide.group > 32 && space.width >= 4 {
        space.width /= 2;
        let (narrow, kept) = shape(graph, space);
        if narrow.unrolled && narrow.group == 32 && narrow.is_even() {
            return (narrow, kept);
        }
        space.width *= 2;
    }
    (wide, kept)
}

/// Rows of more items take a thread of its own longer than a kernel takes otherwise.
const LONGEST_ALONE: i64 = 256;

/// Whether threads with a row each would be few, and long at work.
fn has_few_threads(space: &Space) -> bool {
    let alone = space
        .vector
        .is_some_and(|vector| space.loops.rows.contains(&vector));
    alone && space.loops.row_count() < FILL && space.loops.row_length() > LONGEST_ALONE
}

/// Lets neighbouring threads have neighbours of a row, if something is read along it. A weight whose rows are
/// multiplied by windows of an image (256 of 9,216, one of both in another order) takes 700 us by threads of
/// their own, of which the results alone are neighbours (H200).
fn share_rows(space: &mut Space, seen: &[Seen]) {
    let mut shared = space.clone();
    shared.choose_vector(seen, false);
    let along = |vector| {
        seen.iter()
            .any(|seen| seen.weight == 1 && seen.index.stride(vector) == Some(1))
    };
    if shared.vector.is_some_and(along) {
        *space = shared;
    }
}

/// Writes the kernels.
pub(super) fn generate(graph: &Graph, space: &mut Space, seen: &[Seen]) -> (Vec<Launch>, usize) {
    let by_column = {
        let mut writer = Writer::new(graph, space);
        writer.lates().iter().any(|(_, late)| late.by_column())
    };
    space.choose_vector(seen, !by_column);
    if has_few_threads(space) {
        share_rows(space, seen);
    }
    space.choose_width(seen, false);
    if space
        .vector
        .is_none_or(|vector| !space.loops.cols.contains(&vector))
    {
        space.width = 1;
    }
    let (shape, kept) = choose_shape(graph, space);
    let mut writer = Writer::new(graph, space);
    if shape.unrolled {
        writer.kept.keys = kept;
        writer.turns = shape.turns;
    }
    let lates = writer.lates();
    let partials: Vec<Partials> = lates
        .iter()
        .map(|(_, late)| {
            let in_memory = late.by_column() && !shape.unrolled;
            writer.partials(late, shape.blocks(), "blockIdx.x", !in_memory)
        })
        .collect();
    let text = row(&mut writer, &shape, &lates, &partials);
    let mut statements: String = writer.top.iter().map(|line| format!("{line}\n")).collect();
    let mut shared = 0;
    let mut ends = String::new();
    for ((_, late), partials) in lates.iter().zip(&partials) {
        statements.push_str(&begin_late(&writer, &shape, late, partials));
        if !late.by_column() {
            if has_total(late) {
                ends.push_str(&format!("{0} = (float)total_{0};\n", late.name));
            }
            ends.push_str(&writer.store_total(late, partials, shape.threads));
        } else if shape.unrolled {
            if shape.abreast() > 1 {
                shared = shared.max(shape.abreast() * shape.items * space.width * late.dtype.size() as i64);
            }
            ends.push_str(&store_columns(&writer, &shape, late, partials));
        }
    }
    let pairs: Vec<(&Late, &Partials)> = lates.iter().map(|(_, late)| late).zip(&partials).collect();
    let combinations = writer.combinations(&pairs);
    statements.push_str(&rows(&writer, &shape, &text));
    let launch = Launch {
        text: FunctionText {
            helpers: String::new(),
            parameters: writer.parameters(),
            body: statements + &ends,
            threads: shape.threads as u32,
            device_only: false,
            blocks: shape.blocks_of_a_multiprocessor(),
        },
        grid: [grid(shape.blocks()), 1, 1],
        shared_bytes: (ceil(shared, 16) * 16) as u32,
        role: Role::Alone,
        arguments: writer.arguments,
    };
    (
        std::iter::once(launch).chain(combinations).collect(),
        writer.scratch,
    )
}

/// The loops over the rows of a block, around `text`.
fn rows(writer: &Writer<'_>, shape: &Shape, text: &str) -> String {
    let ty = writer.index_type();
    let space = writer.space;
    let (group, abreast, rows, each) = (shape.group, shape.abreast(), shape.rows, shape.each);
    let (lane, own) = match shape.group {
        _ if abreast == 1 => ("threadIdx.x".to_owned(), "0".to_owned()),
        1 => ("0".to_owned(), "threadIdx.x".to_owned()),
        _ => (format!("threadIdx.x % {group}"), format!("threadIdx.x / {group}")),
    };
    let mut head = format!("const {ty} lane = {lane};\n");
    let first = format!("({ty})blockIdx.x * {each}");
    let end = if shape.late {
        head.push_str(&format!(
            "const {ty} first = {first};\nconst {ty} last = first + {each} < {rows} ? first + {each} : {rows};\n\
             for ({ty} base = first; base < last; base += {abreast}) {{\n{ty} row = base + {own};\n"
        ));
        if shape.ragged() {
            head.push_str("const bool active = row < last;\nif (!active) row = last - 1;\n");
        }
        "}\n"
    } else {
        head.push_str(&format!("{ty} row = {first} + {own};\n"));
        if shape.ragged() {
            head.push_str(&format!(
                "const bool active = row < {rows};\nif (!active) row = {rows} - 1;\n"
            ));
        }
        ""
    };
    head.push_str(&coordinates(space, &space.loops.rows, ty, "row"));
    head + text + end
}

/// Everything that happens on one row.
fn row(writer: &mut Writer<'_>, shape: &Shape, lates: &[(usize, Late)], partials: &[Partials]) -> String {
    writer.begin_row();
    let nest = &writer.space.loops.nest;
    let of_points = |store: &Store| vars(&store.index) & !writer.space.loops.row_set() != 0;
    let stores = nest
        .stores
        .iter()
        .filter(|store| !nest.late.contains(&store.value));
    let (of_points, of_rows): (Vec<Store>, Vec<Store>) = stores.cloned().partition(of_points);
    let passes = passes(writer, lates, of_points);
    let mut texts = Vec::new();
    for (number, pass) in passes.iter().enumerate() {
        writer.pass = number;
        texts.push(one_pass(writer, shape, pass, number, lates, partials));
    }
    writer.pass = passes.len();
    let active = if shape.ragged() { " && active" } else { "" };
    let mut ends = String::new();
    for store in &of_rows {
        let dtype = writer.buffer_dtype(store.buffer);
        writer.see(&store.position, 2, dtype);
        let register = writer.eval(store.value, &store.index);
        let at = writer.target(Argument::Buffer(store.buffer));
        let (position, x) = (
            writer.index_text(&store.position, false),
            c::narrowed(dtype, &register.name),
        );
        ends.push_str(&format!("if (lane == 0{active}) a{at}[{position}] = {x};\n"));
    }
    for (_, late) in lates.iter().filter(|(_, late)| has_total(late)) {
        ends.push_str(&format!("total_{0} += {0};\n{0} = 0.0f;\n", late.name));
    }
    let mut text: String = writer
        .row_arrays
        .drain(..)
        .map(|line| format!("{line}\n"))
        .collect();
    for stage in 0..writer.sections.len().max(texts.len()) {
        for line in writer.sections.get(stage).into_iter().flatten() {
            text.push_str(line);
            text.push('\n');
        }
        // A store may be to the memory of a tensor of which the row has read one element, by threads that are
        // behind.
        let overwrites = |store: &Store| writer.read_by_rows.contains(&store.buffer.bytes(writer.graph));
        let pass = passes.get(stage);
        if shape.group > 1 && pass.is_some_and(|pass| pass.stores.iter().any(overwrites)) {
            text.push_str(if shape.group > 32 {
                "__syncthreads();\n"
            } else {
                "__syncwarp();\n"
            });
        }
        text.push_str(texts.get(stage).map_or("", String::as_str));
    }
    text + &ends
}

/// What each pass over a row does.
fn passes(writer: &mut Writer<'_>, lates: &[(usize, Late)], stores: Vec<Store>) -> Vec<Pass> {
    let mut passes: Vec<Pass> = Vec::new();
    let pass = |passes: &mut Vec<Pass>, stage: usize| {
        while passes.len() <= stage {
            passes.push(Pass {
                sums: Vec::new(),
                stores: Vec::new(),
                lates: Vec::new(),
            });
        }
    };
    for &node in &writer.space.loops.nest.members {
        let data = writer.graph.node(node);
        let own =
            matches!(data.op, Op::Reduce { .. }) && !writer.space.loops.nest.late.contains(&data.outputs[0]);
        if own {
            let stage = writer.stage(data.inputs[0]);
            pass(&mut passes, stage);
            let sum = sum(writer, node);
            passes[stage].sums.push(sum);
        }
    }
    for (stage, late) in lates {
        pass(&mut passes, *stage);
        passes[*stage].lates.push(late.clone());
    }
    for store in stores {
        let stage = writer.stage(store.value);
        pass(&mut passes, stage);
        passes[stage].stores.push(store);
    }
    passes
}

fn sum(writer: &mut Writer<'_>, node: Node) -> Sum {
    let data = writer.graph.node(node);
    let Op::Reduce { op, .. } = &data.op else {
        unreachable!("members that reduce are reductions")
    };
    let value = data.outputs[0];
    let nest = &writer.space.loops.nest;
    Sum {
        index: nest.reduced_operand_index(writer.graph, node, &nest.maps[&value]),
        name: writer.fresh("sum"),
        value,
        x: data.inputs[0],
        op: *op,
        dtype: writer.graph.dtype(value),
    }
}

/// Whether a late reduction adds up each row by itself in f32, and the rows in f64.
fn has_total(late: &Late) -> bool {
    late.of_points && !late.by_column() && late.op == ReduceOp::Sum && late.dtype == DType::F32
}

/// The loop of one pass, and the results of its reductions.
fn one_pass(
    writer: &mut Writer<'_>,
    shape: &Shape,
    pass: &Pass,
    number: usize,
    lates: &[(usize, Late)],
    partials: &[Partials],
) -> String {
    let active = shape.ragged().then_some("active");
    let mut text = String::new();
    // Sums of many terms are cut into blocks.
    let long = !shape.unrolled && shape.turns * writer.width > LONGEST;
    let in_blocks = |sum: &Sum| long && sum.op == ReduceOp::Sum && sum.dtype.compute() == DType::F32;
    let mut flush = String::new();
    for sum in &pass.sums {
        let (ty, name) = (c::register_type(sum.dtype), &sum.name);
        text.push_str(&format!("{ty} {name} = {};\n", c::neutral(sum.op, sum.dtype)));
        if in_blocks(sum) {
            text.push_str(&format!("double total_{name} = 0.0;\n"));
            flush.push_str(&format!("total_{name} += {name};\n{name} = 0.0f;\n"));
        }
    }
    for late in pass.lates.iter().filter(|late| long && has_total(late)) {
        flush.push_str(&format!("total_{0} += {0};\n{0} = 0.0f;\n", late.name));
    }
    writer.begin_points();
    for sum in &pass.sums {
        let x = writer.eval(sum.x, &sum.index);
        let next = c::combine(sum.op, sum.dtype, &sum.name, &x.name);
        writer.body.push(format!("{} = {next};", sum.name));
    }
    for late in &pass.lates {
        let memory = lates.iter().position(|(_, own)| own.name == late.name);
        accumulate(writer, shape, late, memory.and_then(|at| partials.get(at)));
    }
    for store in &pass.stores {
        let dtype = writer.buffer_dtype(store.buffer);
        writer.see(&store.position, 2, dtype);
        writer.store_point(store);
    }
    let fills: String = writer.fills.drain(..).map(|line| format!("{line}\n")).collect();
    if !fills.is_empty() {
        text.push_str(&columns(writer, shape, &fills, ""));
    }
    let points = writer.end_points(active);
    if !points.is_empty() {
        text.push_str(&columns(writer, shape, &points, &flush));
    }
    for sum in &pass.sums {
        let (by, group, name) = (c::joiner(sum.op), shape.group, &sum.name);
        let whole = match in_blocks(sum) {
            true => format!("(float)kiln_group<{by}, {group}>(total_{name})"),
            false => format!("kiln_group<{by}, {group}>({name})"),
        };
        let result = writer.fresh("r");
        text.push_str(&format!(
            "const {} {result} = {whole};\n",
            c::register_type(sum.dtype)
        ));
        let register = Register {
            name: result,
            dtype: sum.dtype,
            place: Place {
                level: 1,
                stage: number + 1,
                lane: false,
            },
        };
        writer.reduced.insert(sum.value, register);
    }
    text
}

/// The loop over the items of a row; `flush` follows each block of them.
fn columns(writer: &Writer<'_>, shape: &Shape, points: &str, flush: &str) -> String {
    let ty = writer.index_type();
    let (group, items) = (shape.group, shape.items);
    let own = coordinates(writer.space, &writer.space.loops.cols, ty, "item");
    if shape.unrolled {
        let guard = if items % group == 0 {
            String::new()
        } else {
            format!("if (item < {items}) ")
        };
        return format!(
            "#pragma unroll\nfor (int k = 0; k < {}; k++) {{\nconst {ty} item = k * {group} + lane;\n{guard}{{\n{own}{points}}}\n}}\n",
            shape.turns
        );
    }
    if flush.is_empty() {
        let unroll = super::unroll(writer, points);
        return format!(
            "{unroll}for ({ty} item = lane; item < {items}; item += {group}) {{\n{own}{points}}}\n"
        );
    }
    let block = group * (BLOCK / writer.width).max(1);
    format!(
        "for ({ty} from = lane; from < {items}; from += {block}) {{\n\
         const {ty} to = from + {block} < {items} ? from + {block} : {items};\n\
         for ({ty} item = from; item < to; item += {group}) {{\n{own}{points}}}\n{flush}}}\n"
    )
}

// ---- late reductions beside rows ----

/// Adds what the point, or the row, has to the accumulator of a late reduction.
fn accumulate(writer: &mut Writer<'_>, shape: &Shape, late: &Late, partials: Option<&Partials>) {
    let x = writer.eval(late.x, &late.index);
    let only = if shape.ragged() { "if (active) " } else { "" };
    if !late.of_points {
        let next = c::combine(late.op, late.dtype, &late.name, &x.name);
        let active = if shape.ragged() { " && active" } else { "" };
        let place = Place { level: 1, ..x.place };
        writer.line(place, format!("if (lane == 0{active}) {} = {next};", late.name));
        return;
    }
    if !late.by_column() {
        let next = c::combine(late.op, late.dtype, &late.name, &x.name);
        writer.body.push(format!("{only}{} = {next};", late.name));
        return;
    }
    writer.see(&late.position, 1, late.dtype);
    if shape.unrolled {
        let own = element(writer, late);
        let next = c::combine(late.op, late.dtype, &own, &x.name);
        writer.body.push(format!("{only}{own} = {next};"));
    } else if let Some(partials) = partials {
        let at = format!(
            "{}[{}]",
            partials.address,
            writer.index_text(&late.position, true)
        );
        let next = c::combine(late.op, late.dtype, &c::widened(partials.dtype, &at), &x.name);
        let stored = c::narrowed(partials.dtype, &next);
        writer.body.push(format!("{only}{at} = {stored};"));
    }
}

/// The accumulator of a column in registers.
fn element(writer: &Writer<'_>, late: &Late) -> String {
    match writer.width {
        1 => format!("{}[k]", late.name),
        _ => format!("{}[k][l]", late.name),
    }
}

/// A loop over the items of a thread and their neighbours, as [`columns`] has it; `text` may refer to
/// [`element`].
fn each_element(writer: &Writer<'_>, shape: &Shape, text: &str) -> String {
    let lanes = match writer.width {
        1 => String::new(),
        width => format!("#pragma unroll\nfor (int l = 0; l < {width}; l++) "),
    };
    columns(writer, shape, &format!("{lanes}{text}\n"), "")
}

/// Declares the accumulator of a late reduction.
fn begin_late(writer: &Writer<'_>, shape: &Shape, late: &Late, partials: &Partials) -> String {
    let (ty, name, neutral) = (late.register(), &late.name, late.neutral());
    if !late.by_column() {
        let total = if has_total(late) {
            format!("double total_{name} = 0.0;\n")
        } else {
            String::new()
        };
        return format!("{ty} {name} = {neutral};\n{total}");
    }
    let lane = match shape.abreast() {
        1 => "threadIdx.x".to_owned(),
        _ => format!("threadIdx.x % {}", shape.group),
    };
    let scope = format!("{{\nconst {} lane = {lane};\n", writer.index_type());
    if !shape.unrolled {
        let position = writer.index_text(&late.position, true);
        let stored = c::narrowed(partials.dtype, &neutral);
        let fill = format!("{}[{position}] = {stored};", partials.address);
        return format!("{scope}{}}}\n", each_element(writer, shape, &fill));
    }
    let width = if writer.width == 1 {
        String::new()
    } else {
        format!("[{}]", writer.width)
    };
    let own = element(writer, late);
    let turns = shape.turns;
    let lanes = match writer.width {
        1 => String::new(),
        width => format!("#pragma unroll\nfor (int l = 0; l < {width}; l++) "),
    };
    format!(
        "{ty} {name}[{turns}]{width};\n#pragma unroll\nfor (int k = 0; k < {turns}; k++) {{\n{lanes}{own} = {neutral};\n}}\n"
    )
}

/// Combines the groups of a block, column by column, through shared memory, and stores the partial results.
fn store_columns(writer: &Writer<'_>, shape: &Shape, late: &Late, partials: &Partials) -> String {
    if shape.abreast() == 1 {
        let position = writer.index_text(&late.position, true);
        let stored = c::narrowed(partials.dtype, &element(writer, late));
        let store = format!("{}[{position}] = {stored};", partials.address);
        return each_element(writer, shape, &store);
    }
    let (ty, index) = (late.register(), writer.index_type());
    let (width, items, abreast, threads) = (writer.width, shape.items, shape.abreast(), shape.threads);
    let lane = if width == 1 { "" } else { " + l" };
    let group = match abreast {
        1 => "0".to_owned(),
        _ => format!("threadIdx.x / {}", shape.group),
    };
    let write = format!(
        "parts[({group} * {items} + item) * {width}{lane}] = {};",
        element(writer, late)
    );
    let next = c::combine(
        late.op,
        late.dtype,
        "x",
        &format!("parts[(g * {items} + item) * {width}{lane}]"),
    );
    let stored = c::narrowed(partials.dtype, "x");
    let position = writer.index_text(&late.position, true);
    let lanes = if width == 1 {
        String::new()
    } else {
        format!("for (int l = 0; l < {width}; l++) ")
    };
    debug_assert_ne!(writer.lanes(&late.position), Lanes::Same);
    format!(
        "{{\n{ty}* parts = ({ty}*)kiln_dynamic_shared();\n__syncthreads();\n{}__syncthreads();\n\
         for ({index} item = threadIdx.x; item < {items}; item += {threads}) {{\n{}{lanes}{{\n\
         {ty} x = parts[item * {width}{lane}];\nfor (int g = 1; g < {abreast}; g++) x = {next};\n\
         {}[{position}] = {stored};\n}}\n}}\n}}\n",
        each_element(writer, shape, &write),
        coordinates(writer.space, &writer.space.loops.cols, index, "item"),
        partials.address
    )
}
