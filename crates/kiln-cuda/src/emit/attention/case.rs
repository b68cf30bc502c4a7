//! The struct of constants that the templates take as their parameter.

use std::fmt::Write as _;

use super::operands::{Operands, View, ctype};
use super::plan::{Plan, TensorPlan};
use crate::kernels::attention::instructions;

/// Half of the cache of the reference machine, in bytes.
const CACHED: usize = 24 << 20;

/// A case of the templates.
pub struct Case<'a> {
    /// The tensors that the attention reads and writes.
    pub operands: &'a Operands,
    /// Its tiles.
    pub plan: Plan,
    /// Its tiles on tensor cores, if these compute it.
    pub tensor: Option<TensorPlan>,
    /// Views besides those of the operands.
    pub views: Vec<(&'static str, &'a View)>,
}

impl Case<'_> {
    /// The type that is computed in.
    pub fn real(&self) -> &'static str {
        ctype(self.operands.real).unwrap_or("float")
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.tensor.map_or(self.plan.threads, |tensor| tensor.threads())
    }

    /// Blocks that share the rows of queries of a head.
    pub fn row_tiles(&self) -> usize {
        let queries = self.operands.extents.queries;
        self.tensor
            .map_or(self.plan.tiles(queries) * self.plan.chunks, |tensor| {
                tensor.tiles(queries)
            })
    }

    /// Blocks that share the keys of a head.
    pub fn key_row_tiles(&self) -> usize {
        let keys = self.operands.extents.keys;
        self.tensor
            .map_or(self.plan.tiles(keys) * self.plan.chunks, |tensor| {
                tensor.tiles(keys)
            })
    }

    /// Whether attention may leave out tiles in which the mask hides every key: a score there is `fill`,
    /// whatever the key. A block that has all keys leaves out none.
    pub fn leaves_out(&self) -> bool {
        let at_once = self.tensor.is_some_and(|tensor| tensor.at_once);
        self.operands.hidden.is_some() && !self.operands.dims.mask_last && !at_once
    }

    /// Number of tiles of the mask that a launch before attention looks at, if attention may leave out some
    /// of them and does not know which.
    pub fn mapped_tiles(&self) -> Option<usize> {
        let hidden = self.operands.hidden.as_ref()?;
        if !self.leaves_out() || self.operands.ahead.is_some() {
            return None;
        }
        let [batch, heads, rows] = self.map_extents(hidden);
        Some(batch * heads * rows * self.key_tiles())
    }

    /// Whether every tile of tensor cores is inside the head.
    fn has_whole_tiles(&self) -> bool {
        let e = &self.operands.extents;
        self.tensor.is_some_and(|tensor| {
            let step = tensor.own().max(tensor.other());
            let is_padded = |width: usize| tensor.element.padded(width) != width;
            (e.queries % step, e.keys % step) == (0, 0) && !is_padded(e.width) && !is_padded(e.value_width)
        })
    }

    /// Heads whose operands the cache holds: as many in each group, for a last group of a few would keep a few
    /// multiprocessors at work when all others are done.
    fn grouped_heads(&self) -> usize {
        let e = &self.operands.extents;
        let element = if self.operands.query.ctype.starts_with("kiln_") {
            2
        } else {
            self.plan.bytes
        };
        let bytes = e.queries.max(e.keys) * (e.width + e.value_width) * element;
        let all = e.batch * e.heads;
        all.div_ceil(all.div_ceil((CACHED / bytes).clamp(1, all)))
    }

    fn key_tiles(&self) -> usize {
        self.plan.tiles(self.operands.extents.keys)
    }

    /// Sequences, heads and tiles of rows of a mask.
    fn map_extents(&self, hidden: &View) -> [usize; 3] {
        let [batch, heads, rows, _] = hidden.extents;
        [batch, heads, self.plan.tiles(rows)]
    }

    /// The struct, and those of the views.
    pub fn text(&self) -> String {
        let Self { operands, plan, .. } = self;
        let e = &operands.extents;
        let mut views = String::new();
        let mut names = String::new();
        let mut view = |name: &str, view: &View| {
            views.push_str(&view_text(name, view));
            let _ = writeln!(names, "    typedef @_{name} {name}_view;");
        };
        view("query", &operands.query);
        view("key", &operands.key);
        view("value", &operands.value);
        // Views without an operand stand for nothing: no branch that reads them is compiled.
        view("mask", operands.mask.as_ref().unwrap_or(&operands.query));
        view("hidden", operands.hidden.as_ref().unwrap_or(&operands.query));
        for (name, own) in &self.views {
            view(name, own);
        }
        let map = operands
            .hidden
            .as_ref()
            .map_or([1; 3], |hidden| self.map_extents(hidden));
        views.push_str(&self.map_text(map));
        names.push_str("    typedef @_map map_view;\n");
        let numbers = [
            ("batch", e.batch),
            ("heads", e.heads),
            ("key_heads", e.key_heads),
            ("queries", e.queries),
            ("keys", e.keys),
            ("width", e.width),
            ("value_width", e.value_width),
            // What kernels decide by: the extents themselves may be numbers of a family's kernel.
            ("KEYS_STEP", 1 << e.keys.trailing_zeros().min(2)),
            ("TILE", plan.tile),
            ("RM", plan.each[0]),
            ("RN", plan.each[1]),
            ("ACROSS", plan.tile / plan.each[1]),
            ("THREADS", self.threads()),
            ("WIDTH_DEPTH", plan.width_depth),
            ("VALUE_DEPTH", plan.value_depth),
            ("PITCH", plan.pitch),
            ("WEIGHTS_PITCH", plan.weights_pitch),
            ("VECTOR", plan.vector),
            ("GROUPS", plan.groups),
            ("COLUMNS", plan.columns),
            ("CHUNKS", plan.chunks),
            ("SECOND", plan.second),
            ("ROW_TILES", plan.tiles(e.queries)),
            ("KEY_TILES", self.key_tiles()),
            ("GROUPED", self.grouped_heads()),
            ("map_heads", map[1]),
            ("map_rows", map[2]),
        ];
        let dims = &operands.dims;
        let flags = [
            ("one_tile", e.keys <= plan.tile),
            ("causal", dims.causal),
            ("mask", dims.mask),
            ("hidden", dims.hidden),
            ("whole", self.has_whole_tiles()),
            ("mapped", self.leaves_out()),
            ("ordered", operands.ahead.is_some()),
            ("mask_last", dims.mask_last),
            ("dropout", dims.dropout),
            ("drop_scores", dims.drop_scores),
            ("safe", dims.safe),
            (
                "given",
                self.tensor.is_some() && operands.given_result().is_some(),
            ),
        ];
        let mut text = format!(
            "{views}struct @_case {{\n    typedef {} real;\n    typedef {} stored;\n    typedef {} mask_type;\n{names}",
            self.real(),
            operands.query.ctype,
            operands.mask.as_ref().map_or("float", |mask| mask.ctype),
        );
        let tensor = self.tensor.iter().flat_map(|tensor| {
            [
                ("WIDE", tensor.element.padded(e.width)),
                ("VALUE_WIDE", tensor.element.padded(e.value_width)),
                ("MT", tensor.row_blocks),
                ("NT", tensor.column_blocks),
                ("OWN", tensor.own()),
                ("OTHER", tensor.other()),
                ("OWN_TILES", tensor.tiles(e.queries)),
                ("OWN_KEY_TILES", tensor.tiles(e.keys)),
                ("MOST_QUERIES", TensorPlan::MOST_QUERIES),
            ]
        });
        for (name, number) in numbers.into_iter().chain(tensor) {
            let _ = writeln!(text, "    static constexpr int {name} = {number};");
        }
        let _ = writeln!(
            text,
            "    static constexpr int ahead = {};",
            operands.ahead.unwrap_or(0)
        );
        if let Some(tensor) = self.tensor {
            let _ = writeln!(text, "    static constexpr bool WARPGROUPS = {};", tensor.grouped);
            if tensor.grouped {
                let element = operands.query.ctype.trim_start_matches("kiln_");
                let widths = [e.width, e.value_width];
                text.push_str(&instructions(tensor.other(), &widths, element));
            }
        }
        for (name, flag) in flags {
            let _ = writeln!(text, "    static constexpr bool {name} = {flag};");
        }
        text.push_str("};\n");
        text
    }

    /// Strides of the map of a mask's tiles; 0 where the mask repeats.
    fn map_text(&self, [batch, heads, rows]: [usize; 3]) -> String {
        let tiles = self.key_tiles();
        let stride = |extent: usize, inner: usize| if extent == 1 { 0 } else { inner };
        // A mask that rows do not share may have one row of tiles: then the row of tiles is 0 anyway.
        strides_text(
            "map",
            [
                stride(batch, heads * rows * tiles),
                stride(heads, rows * tiles),
                stride(rows, tiles),
            ],
        )
    }
}

/// Each number is a declaration of its own: it may be a number of a family's kernel.
fn strides_text(name: &str, [batch, head, row]: [usize; 3]) -> String {
    format!(
        "struct @_{name} {{\n    static constexpr long long batch = {batch};\n    static constexpr long long head = {head};\n    \
         static constexpr int row = {row};\n}};\n"
    )
}

fn view_text(name: &str, view: &View) -> String {
    let mut text = format!("struct @_{name} {{\n");
    for (name, stride) in ["batch", "head", "row", "column"].iter().zip(view.strides) {
        let _ = writeln!(text, "    static constexpr long long {name} = {stride};");
    }
    let _ = writeln!(
        text,
        "    static constexpr int columns = {};\n    typedef {} index;\n    static constexpr bool vectors = {};\n}};",
        view.extents[3],
        view.index(),
        view.vectors()
    );
    text
}
