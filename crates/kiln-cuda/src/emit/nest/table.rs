//! Nests side by side: those of equal text become one launch over a table of tensors.
//!
//! A row of the first table has the addresses of one nest's tensors and runtime scalars, and the number of
//! elements. A row of the second is a chunk: which row, and the first element. So a thousand small
//! parameters, each with a learning rate of its own, keep the device as busy as one large one. No size is
//! part of the text, but for the length of rows where tensors are parts of each row of another: the gradients
//! that one product makes of several weights.

use kiln_compiler::schedule::nest::Nest;
use kiln_graph::Graph;

use super::space::Space;
use super::writer::Writer;
use super::{
    Argument, Call, EmitOptions, KernelCode, Launch, Role, coordinates, grid, points, prepare, tiles,
};
use crate::code::FunctionText;

/// Threads of a block.
const THREADS: i64 = 256;

/// Turns of a thread.
const TURNS: i64 = 4;

/// Nests that share a launch: text, and a row for each of them.
struct Task {
    text: FunctionText,
    rows: Vec<(Vec<Argument>, i64)>,
    chunk: i64,
}

/// Nests side by side: those of equal text become one launch over a table.
pub fn together(graph: &Graph, nests: &[Nest], options: &EmitOptions<'_>) -> KernelCode {
    let mut tasks: Vec<Task> = Vec::new();
    let mut code = KernelCode::default();
    for nest in nests {
        let Some(task) = task(graph, nest) else {
            let own = super::generate(graph, nest, options);
            debug_assert_eq!(own.scratch, 0, "what reduces is not joined");
            code.calls.extend(own.calls);
            continue;
        };
        match tasks.iter_mut().find(|own| own.text == task.text) {
            Some(own) => own.rows.extend(task.rows),
            None => tasks.push(task),
        }
    }
    code.calls
        .extend(tasks.into_iter().map(|task| Call::Launch(launch(task))));
    code
}

/// The text of a nest: over one variable of any extent, over one element, or over several variables whose
/// extents, but for the first, are part of the text. None for nests that are not written point by point.
fn task(graph: &Graph, nest: &Nest) -> Option<Task> {
    let mut space = Space::new(nest);
    if nest.split.is_some() {
        return None;
    }
    let seen = prepare(&mut space, |space| points::seen(graph, space));
    if space.wide {
        return None;
    }
    space.choose_vector(&seen, false);
    let elements = space.loops.row_length();
    let flat = space.loops.cols.len() <= 1;
    if !flat {
        // A part of each row of a matrix. What is transposed has tiles of its own.
        space.choose_width(&seen, false);
        if tiles::generate(graph, &space, &seen).is_some() {
            return None;
        }
    } else if let Some(vector) = space.vector {
        // Every size takes as many neighbours; what is left over goes one by one.
        let extent = &mut space.loops.nest.extents[vector as usize];
        let own = std::mem::replace(extent, 1 << 20);
        space.choose_width(&seen, true);
        space.loops.nest.extents[vector as usize] = own;
    }
    let mut writer = Writer::new(graph, &space);
    writer.parts = true;
    let (width, ty) = (space.width, writer.index_type());
    let text = points::body(&mut writer);
    let var = space.vector.unwrap_or(0);
    let chunk = THREADS * TURNS * width;
    let number = if flat { format!("i{var}") } else { "t".to_owned() };
    let mut loops = format!(
        "for ({ty} {number} = first + threadIdx.x * {width}; {number} < last; {number} += {}) {{\n",
        THREADS * width
    );
    if !flat {
        let from = format!("({number} / {width})");
        loops.push_str(&coordinates(&space, &space.loops.cols, ty, &from));
        loops.push_str(&format!("{text}}}\n"));
    } else if width > 1 {
        writer.width = 1;
        let single = points::body(&mut writer);
        loops.push_str(&format!(
            "if (i{var} + {width} <= last) {{\n{text}}} else {{\nfor ({ty} from = i{var}; from < last; from++) {{\n\
             const {ty} i{var} = from;\n{single}}}\n}}\n}}\n"
        ));
    } else {
        loops.push_str(&format!("{text}}}\n"));
    }
    let (mut row, mut pointers) = (Vec::new(), String::new());
    for (at, (argument, written)) in writer.arguments.iter().zip(&writer.written).enumerate() {
        let constant = if *written { "" } else { "const " };
        if matches!(argument, Argument::Scratch(_) | Argument::Table(_)) {
            return None;
        }
        let pointed = writer.pointed(argument);
        pointers.push_str(&format!(
            "{constant}{pointed}* const a{at} = ({constant}{pointed}*)row[{}];\n",
            row.len()
        ));
        row.push(argument.clone());
    }
    let words = row.len();
    let top: String = writer.top.iter().map(|line| format!("{line}\n")).collect();
    let body = format!(
        "const kiln_u64* row = rows + chunks[2 * blockIdx.x] * {};\nconst {ty} count = ({ty})row[{words}];\n\
         const {ty} first = ({ty})chunks[2 * blockIdx.x + 1];\nconst {ty} last = first + {chunk} < count ? first + {chunk} : count;\n\
         {pointers}{top}{loops}",
        words + 1
    );
    let text = FunctionText {
        helpers: String::new(),
        parameters: ["rows", "chunks"]
            .map(|name| format!("const kiln_u64* {name}"))
            .to_vec(),
        body,
        threads: THREADS as u32,
        device_only: false,
        blocks: 0,
    };
    Some(Task {
        text,
        rows: vec![(row, elements)],
        chunk,
    })
}

fn launch(task: Task) -> Launch {
    let mut chunks = Vec::new();
    for (row, (_, elements)) in task.rows.iter().enumerate() {
        let firsts = (0..*elements).step_by(task.chunk as usize);
        chunks.extend(firsts.map(|first| (Vec::new(), vec![row as u64, first as u64])));
    }
    let blocks = grid(chunks.len() as i64);
    let rows = task
        .rows
        .into_iter()
        .map(|(row, elements)| (row, vec![elements as u64]));
    Launch {
        text: task.text,
        grid: [blocks, 1, 1],
        shared_bytes: 0,
        role: Role::Alone,
        arguments: vec![Argument::Table(rows.collect()), Argument::Table(chunks)],
    }
}
