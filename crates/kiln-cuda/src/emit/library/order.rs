//! Sorting of lists of items: a key with the place where it was.
//!
//! Short lists are sorted in shared memory, several in a block. Of a long one each block sorts a tile. If all
//! items are wanted, passes merge pairs of sorted runs until one is left; if only the first few are, the
//! first few of each tile make a shorter list, which is sorted in turn.

use super::super::text::{Text, blocks, index_type};
use super::super::{Argument, Launch};

/// Items of a list that one block sorts whole: of 8 bytes, and half as many of 16, in 32 KiB of shared
/// memory.
const LONGEST: usize = 4096;
/// Items of a tile of a longer list.
const TILE: usize = 2048;
/// Items that a block sorts at least, if there are as many.
const SMALLEST: usize = 1024;
/// Items that one thread merges.
const MERGED: usize = 8;
const MERGE_THREADS: usize = 256;

/// Where items come from or go to: parameters, and a text that reads or writes one. The text knows the list
/// as `row` and the item's number there as `k`; one that writes also knows the `item`.
pub(super) struct Port<'a> {
    pub declare: &'a dyn Fn(Text) -> Text,
    pub text: &'a str,
}

/// Lists to sort.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    /// How many there are.
    pub rows: usize,
    /// Items of each, fewer than 2^32 - 1.
    pub extent: usize,
    /// How many of the first are wanted.
    pub keep: usize,
    /// Whether keys have 64 bits.
    pub wide: bool,
    /// Whether neighbouring lists, and not neighbouring items, are neighbours in memory.
    pub across: bool,
}

impl Order {
    /// The type of the items.
    pub fn item(&self) -> &'static str {
        if self.wide { "kiln_item64" } else { "kiln_item32" }
    }

    /// Bytes of an item.
    pub fn item_bytes(&self) -> usize {
        if self.wide { 16 } else { 8 }
    }

    fn tiles(&self) -> usize {
        let longest = if self.wide { LONGEST / 2 } else { LONGEST };
        if self.extent <= longest {
            1
        } else {
            self.extent.div_ceil(TILE)
        }
    }

    /// Whether the first items of each tile make a list that is at most half as long.
    fn selects(&self) -> bool {
        2 * self.keep <= TILE
    }

    /// Bytes of working memory: two lists of items, the first of which is larger if the lists get shorter.
    pub fn scratch(&self) -> usize {
        if self.tiles() == 1 {
            return 0;
        }
        let lengths = if self.selects() {
            let first = self.tiles() * self.keep;
            [first, first.div_ceil(TILE) * self.keep]
        } else {
            [self.extent; 2]
        };
        lengths.into_iter().map(|length| self.list_bytes(length)).sum()
    }

    fn list_bytes(&self, length: usize) -> usize {
        (self.rows * length * self.item_bytes()).next_multiple_of(256)
    }

    /// The launches that sort, with working memory from byte `scratch` on.
    pub fn launches(&self, scratch: usize, source: &Port<'_>, sink: &Port<'_>) -> Vec<Launch> {
        let tiles = self.tiles();
        if tiles == 1 {
            return vec![self.sort_tiles(1, self.keep, self.keep, source, sink)];
        }
        if self.selects() {
            let next = scratch + self.list_bytes(tiles * self.keep);
            return self.select([scratch, next], source, sink);
        }
        self.merge_sort(tiles, scratch, source, sink)
    }

    /// Sorts lists that get shorter in turn. The next ones go to byte `places.0` of the working memory, those
    /// after them to byte `places.1`.
    fn select(&self, places: [usize; 2], source: &Port<'_>, sink: &Port<'_>) -> Vec<Launch> {
        let tiles = self.tiles();
        if tiles == 1 {
            return vec![self.sort_tiles(1, self.keep, self.keep, source, sink)];
        }
        let item = self.item();
        let shorter = Self {
            extent: tiles * self.keep,
            across: false,
            ..*self
        };
        let row = shorter.extent;
        let write = format!("selected[row * {row} + k] = item;");
        let read = format!("listed[row * {row} + k]");
        let writes = |text: Text| text.writes(item, "selected", Argument::Scratch(places[0]));
        let reads = |text: Text| text.reads(item, "listed", Argument::Scratch(places[0]));
        let to = Port {
            declare: &writes,
            text: &write,
        };
        let from = Port {
            declare: &reads,
            text: &read,
        };
        let mut launches = vec![self.sort_tiles(tiles, self.keep, row, source, &to)];
        // The lists after the next ones overwrite this call's source, which no later launch reads.
        launches.extend(shorter.select([places[1], places[0]], &from, sink));
        launches
    }

    /// Sorts each tile; the first `tile_keep` items of a tile are numbered on from tile to tile, up to
    /// `limit`.
    fn sort_tiles(
        &self,
        tiles: usize,
        tile_keep: usize,
        limit: usize,
        source: &Port<'_>,
        sink: &Port<'_>,
    ) -> Launch {
        let span = if tiles == 1 {
            self.extent.next_power_of_two().max(2)
        } else {
            TILE
        };
        let most = (self.rows * span).next_power_of_two().min(SMALLEST);
        let tile = if tiles == 1 { span.max(most) } else { TILE };
        let threads = (tile / 2).clamp(32, 1024);
        let text = Text::default()
            .ty("Item", self.item())
            .ty("Index", index_type(self.rows * self.extent.max(limit)))
            .count("ROWS", self.rows)
            .count("EXTENT", self.extent)
            .count("TILES", tiles)
            .count("TILE", tile)
            .count("SPAN", span)
            .count("TILE_KEEP", tile_keep)
            .count("LIMIT", limit)
            .count("ACROSS", usize::from(self.across))
            .count("THREADS", threads);
        let text = (sink.declare)((source.declare)(text));
        let statements = format!(
            "
constexpr int ROWS_HERE = TILE / SPAN;
__shared__ Item items[TILE];
const Index first = (Index)(blockIdx.x / TILES) * ROWS_HERE;
const Index tile = blockIdx.x % TILES;
for (int e = threadIdx.x; e < TILE; e += THREADS) {{
    const int r = ACROSS ? e % ROWS_HERE : e / SPAN, at = ACROSS ? e / ROWS_HERE : e % SPAN;
    const Index row = first + r, k = tile * SPAN + at;
    Item item = Item::last();
    if (row < ROWS && k < EXTENT) item = {source};
    items[r * SPAN + at] = item;
}}
kiln_sort_spans<Item, TILE, SPAN, THREADS>(items);
__syncthreads();
for (int e = threadIdx.x; e < TILE; e += THREADS) {{
    const int r = ACROSS ? e % ROWS_HERE : e / SPAN, at = ACROSS ? e / ROWS_HERE : e % SPAN;
    const Index row = first + r, k = tile * TILE_KEEP + at;
    if (row < ROWS && at < TILE_KEEP && k < LIMIT) {{
        const Item item = items[r * SPAN + at];
        {sink}
    }}
}}
",
            source = source.text,
            sink = sink.text
        );
        let groups = self.rows.div_ceil(tile / span);
        text.launch(&statements, blocks(groups * tiles, 1), threads as u32)
    }

    fn merge_sort(&self, tiles: usize, scratch: usize, source: &Port<'_>, sink: &Port<'_>) -> Vec<Launch> {
        let (item, row) = (self.item(), self.extent);
        let places = [scratch, scratch + self.list_bytes(row)];
        let write = format!("merged[row * {row} + k] = item;");
        let writes = |to: usize| move |text: Text| text.writes(item, "merged", Argument::Scratch(places[to]));
        let first = writes(0);
        let to = Port {
            declare: &first,
            text: &write,
        };
        let mut launches = vec![self.sort_tiles(tiles, TILE, row, source, &to)];
        let mut run = TILE;
        let mut from = 0;
        while run < row {
            let other = writes(1 - from);
            let between = Port {
                declare: &other,
                text: &write,
            };
            let (to, limit) = if 2 * run < row {
                (&between, row)
            } else {
                (sink, self.keep)
            };
            launches.push(self.merge(run, limit, Argument::Scratch(places[from]), to));
            (run, from) = (2 * run, 1 - from);
        }
        launches
    }

    /// Merges pairs of sorted runs of `run` items each, and hands on the first `limit` items.
    fn merge(&self, run: usize, limit: usize, runs: Argument, sink: &Port<'_>) -> Launch {
        let pieces = self.extent.div_ceil(MERGED);
        let text = Text::default()
            .ty("Item", self.item())
            // Pairs of runs may end behind the line.
            .ty("Index", index_type(self.rows * self.extent + 2 * run))
            .count("ROWS", self.rows)
            .count("EXTENT", self.extent)
            .count("LIMIT", limit)
            .count("RUN", run)
            .count("MERGED", MERGED)
            .count("PIECES", pieces)
            .count("THREADS", MERGE_THREADS)
            .reads(self.item(), "runs", runs);
        let text = (sink.declare)(text);
        let statements = format!(
            "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
const Index row = i / PIECES, start = i % PIECES * MERGED;
if (row >= ROWS) return;
const Index pair = start / ((Index)2 * RUN) * ((Index)2 * RUN);
const Index middle = pair + RUN < EXTENT ? pair + RUN : EXTENT, end = middle + RUN < EXTENT ? middle + RUN : EXTENT;
const Item* a = runs + row * EXTENT + pair;
const Item* b = runs + row * EXTENT + middle;
const Index a_count = middle - pair, b_count = end - middle;
Index p = kiln_merge_split<Item, Index>(a, a_count, b, b_count, start - pair), q = start - pair - p;
for (Index k = start; k < start + MERGED && k < EXTENT; k++) {{
    const bool of_a = p < a_count && (q >= b_count || a[p].before(b[q]));
    const Item item = of_a ? a[p] : b[q];
    if (of_a) p++;
    else q++;
    if (k < LIMIT) {{ {sink} }}
}}
",
            sink = sink.text
        );
        text.launch(
            &statements,
            blocks(self.rows * pieces, MERGE_THREADS),
            MERGE_THREADS as u32,
        )
    }
}
