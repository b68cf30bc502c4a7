//! Lines of result pixels in parts: as many pixels at a time as registers hold accumulators for.

use super::blocks::Blocks;
use super::walk::Class;
use crate::kernels::indent;

/// A line cut into parts of nearly equal length, the first of them longer by one pixel.
pub(super) struct Parts {
    /// Parts of a line.
    pub count: usize,
    /// Pixels of a long part.
    pub rows: usize,
    /// How many parts are long.
    long: usize,
}

/// The columns of results that a tile has, as C expressions.
pub(super) struct TileColumns {
    /// Elements between the rows of the tile.
    pub pitch: String,
    /// The channel of the first column.
    pub first: String,
    /// How many columns are channels.
    pub count: String,
}

impl Parts {
    /// `pixels` in parts of at most `most`.
    pub fn of(pixels: usize, most: usize) -> Self {
        let count = pixels.div_ceil(most);
        let rows = pixels.div_ceil(count);
        Self {
            count,
            rows,
            long: pixels - count * (rows - 1),
        }
    }

    /// The different lengths of parts, the long one first.
    pub fn heights(&self) -> Vec<usize> {
        let short = (self.long < self.count).then(|| self.rows - 1);
        std::iter::once(self.rows).chain(short).collect()
    }

    /// C expression of the first pixel of part `part`, a C variable.
    pub fn first(&self, part: &str) -> String {
        let Self { rows, long, .. } = self;
        match self.heights()[..] {
            [_, short] => format!("{part} * {short} + ({part} < {long} ? {part} : {long})"),
            _ => format!("{part} * {rows}"),
        }
    }

    /// C expression of how many pixels part `part` has.
    fn height(&self) -> String {
        let Self { rows, long, .. } = self;
        match self.heights()[..] {
            [_, short] => format!("(part < {long} ? {rows} : {short})"),
            _ => rows.to_string(),
        }
    }

    /// The C condition that part `part`, a C variable, is long.
    pub fn is_long(&self, part: &str) -> String {
        format!("{part} < {}", self.long)
    }

    /// C statements for unit `unit` of `blocks`, after the statements `line`. Each part of the unit finds
    /// its pixels by `pixels`, statements that follow from the first pixel `px`, and computes a tile by
    /// `compute`. Then `name_finish` consumes the tile of these `columns`, or the tile stays among the
    /// results of the block.
    pub fn unit(
        &self,
        (name, class, blocks): (&str, &Class, &Blocks),
        line: &str,
        [pixels, compute]: [&str; 2],
        columns: &TileColumns,
    ) -> String {
        let (first, height) = (self.first("part"), self.height());
        let real = blocks.element.ctype();
        let TileColumns {
            pitch,
            first: column,
            count: columns,
        } = columns;
        let (target, consume) = if blocks.planes {
            let target = format!("result + ((unit - block) * {} + px) * {pitch}", class.count[2]);
            (target, String::new())
        } else {
            let [z, y, x] = [0, 1, 2]
                .map(|d| format!("p{} * {} + {}", ['z', 'y', 'x'][d], class.step[d], class.start[d]));
            let consume = format!(
                "{name}_finish(args, tile, {pitch}, image, {z}, {y}, {x}, {}, {height}, {column}, {columns});\n",
                class.step[2]
            );
            ("tile".to_owned(), consume)
        };
        let part =
            format!("const int64_t px = {first};\n{pixels}{real} *target = {target};\n{compute}{consume}");
        let count = self.count;
        if blocks.by_line {
            format!(
                "const int64_t line = unit;\n{line}for (int64_t part = 0; part < {count}; part++) {{\n{}}}\n",
                indent(&part, 4)
            )
        } else {
            format!("const int64_t line = unit / {count}, part = unit % {count};\n{line}{part}")
        }
    }
}
