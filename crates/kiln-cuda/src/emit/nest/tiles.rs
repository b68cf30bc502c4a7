//! Nests without reductions that read a tensor across: transposes, and what is fused with them.
//!
//! Where a result is contiguous along one variable and an operand along another, neighbouring threads would
//! read elements that lie far apart. So a block has a tile of 32 by 32 points. It brings the operand's part
//! into shared memory in the order in which it lies, and reads it from there in the other. A row of the part
//! has one element more than a warp has lanes, so that the lanes of a warp never meet in a bank.

use kiln_compiler::index::{Index, Var};
use kiln_graph::{DType, Graph};

use super::space::{Seen, Space};
use super::writer::{Place, Writer};
use super::{Launch, Role, THREADS, c, ceil, coordinates, grid, points};
use crate::code::FunctionText;

/// Points of a tile along either variable.
const TILE: i64 = 32;

/// Fewest points along a variable for which a tile pays.
const LEAST: i64 = 16;

/// Bytes of shared memory that a kernel declares at most.
const SHARED: usize = 48 << 10;

/// What a block brings into shared memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Tiles {
    /// The variable along which results are contiguous.
    along: Var,
    /// The variable along which the operands are.
    across: Var,
    declarations: String,
    fills: String,
    bytes: usize,
}

/// Whether neighbours along `across`, but not along `along`, are neighbours in memory.
fn lies_across(position: &Index, along: Var, across: Var) -> bool {
    position.stride(across) == Some(1)
        && position
            .stride(along)
            .is_some_and(|stride| !matches!(stride, 0 | 1))
}

impl Writer<'_> {
    /// The element of shared memory that has what is at `position` of `address`, if the block brings it
    /// there.
    pub(super) fn stage_tile(
        &mut self,
        position: &Index,
        data: Place,
        address: &str,
        dtype: DType,
    ) -> Option<String> {
        let tiles = self.tiles.as_ref()?;
        if data.level == 2 || !lies_across(position, tiles.along, tiles.across) {
            return None;
        }
        let name = self.fresh("tile");
        let text = self.index_text(position, false);
        let tiles = self.tiles.as_mut()?;
        let (ty, row) = (c::memory_type(dtype), TILE + 1);
        tiles.bytes += (TILE * row) as usize * dtype.size();
        tiles
            .declarations
            .push_str(&format!("__shared__ {ty} {name}[{TILE}][{row}];\n"));
        tiles
            .fills
            .push_str(&format!("{name}[line][lane] = {address}[{text}];\n"));
        Some(format!("{name}[lane][line]"))
    }
}

/// The variable along which most of what is read across lies.
fn across(space: &Space, seen: &[Seen]) -> Option<Var> {
    let along = space.vector.filter(|&along| space.loops.extent(along) >= LEAST)?;
    let loads = |var: Var| {
        let across = |seen: &&Seen| seen.weight == 1 && lies_across(&seen.index, along, var);
        seen.iter().filter(across).count()
    };
    let others = space
        .loops
        .cols
        .iter()
        .copied()
        .filter(|&var| var != along && space.loops.extent(var) >= LEAST);
    others.filter(|&var| loads(var) > 0).max_by_key(|&var| loads(var))
}

/// Writes the kernel, if something is read across.
pub(super) fn generate(graph: &Graph, space: &Space, seen: &[Seen]) -> Option<Launch> {
    let (along, across) = (space.vector?, across(space, seen)?);
    let mut space = space.clone();
    space.width = 1;
    let mut writer = Writer::new(graph, &space);
    writer.tiles = Some(Tiles {
        along,
        across,
        ..Tiles::default()
    });
    let text = points::body(&mut writer);
    let tiles = writer.tiles.take()?;
    if tiles.bytes == 0 || tiles.bytes > SHARED {
        return None;
    }
    let ty = writer.index_type();
    let count = |var: Var| ceil(space.loops.extent(var), TILE);
    let others: Vec<Var> = space
        .loops
        .cols
        .iter()
        .copied()
        .filter(|&var| var != along && var != across)
        .collect();
    let lines = THREADS / TILE;
    // The points of a tile whose rows run along `rows`; those beyond the space are left out.
    let each = |rows: Var, lanes: Var, text: &str| {
        let inside = |var: Var| {
            (space.loops.extent(var) % TILE != 0).then(|| format!("i{var} < {}", space.loops.extent(var)))
        };
        let guard: Vec<String> = [rows, lanes].into_iter().filter_map(inside).collect();
        let guard = if guard.is_empty() {
            String::new()
        } else {
            format!("if ({}) ", guard.join(" && "))
        };
        format!(
            "#pragma unroll\nfor (int line = threadIdx.x / {TILE}; line < {TILE}; line += {lines}) {{\n\
             const {ty} i{rows} = first{rows} + line, i{lanes} = first{lanes} + lane;\n{guard}{{\n{text}}}\n}}\n"
        )
    };
    let top: String = writer.top.iter().map(|line| format!("{line}\n")).collect();
    let body = format!(
        "{top}{declarations}const int lane = threadIdx.x % {TILE};\nconst {ty} tile = blockIdx.x;\n\
         const {ty} first{along} = tile % {0} * {TILE}, first{across} = tile / {0} % {1} * {TILE};\n{2}{3}__syncthreads();\n{4}",
        count(along),
        count(across),
        coordinates(
            &space,
            &others,
            ty,
            &format!("tile / {}", count(along) * count(across))
        ),
        each(along, across, &tiles.fills),
        each(across, along, &text),
        declarations = tiles.declarations,
    );
    let blocks = count(along) * count(across) * space.loops.product(&others);
    Some(Launch {
        text: FunctionText {
            helpers: String::new(),
            parameters: writer.parameters(),
            body,
            threads: THREADS as u32,
            device_only: false,
            blocks: 0,
        },
        grid: [grid(blocks), 1, 1],
        shared_bytes: 0,
        role: Role::Alone,
        arguments: writer.arguments.clone(),
    })
}
