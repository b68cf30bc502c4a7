//! How rows are shared out: how many threads have a row, how many rows a block has, and what a thread keeps
//! of its row.

use kiln_compiler::index::Index;
use kiln_compiler::schedule::class::is_expensive;
use kiln_compiler::schedule::nest::vars;
use kiln_graph::Graph;
use rustc_hash::FxHashSet;

use super::late::Late;
use super::rows::dry_run;
use super::space::Space;
use super::writer::{Key, Writer};
use super::{ceil, power_of_two};

/// Rows that an accumulator of a late reduction takes at most, if there are so many blocks.
const LONGEST: i64 = 128;

/// Bytes of registers that the kept elements of a row and late sums may take in a thread: some quarter of
/// what it has.
const KEPT: i64 = 288;

/// The same in a thread of a warp that has a row by itself, and no thread idle.
const KEPT_BY_WARP: i64 = 320;

/// Threads of a row of which a multiprocessor has one block if each thread keeps more than half of [`KEPT`].
/// All wait for the row's statistics, so a second block is worth more than what values cost that are computed
/// again.
const ALONE: i64 = 512;

/// Most turns of an unrolled loop over a row.
const TURNS: i64 = 16;

/// Bytes of shared memory in which the groups of a block combine late results.
const SHARED: i64 = 48 << 10;

/// Threads that keep every multiprocessor busy, if there is work for so many.
pub(super) const FILL: i64 = 132 * 512;

/// How a row is shared out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Threads of a row.
    pub(super) group: i64,
    /// Threads of a block.
    pub(super) threads: i64,
    /// Items of a row.
    pub(super) items: i64,
    /// Items of a thread.
    pub(super) turns: i64,
    /// Whether the loop over them is unrolled.
    pub(super) unrolled: bool,
    /// Whether a block has one row, and a multiprocessor two blocks.
    pub(super) paired: bool,
    pub(super) rows: i64,
    /// Rows of a block: all at once without late reductions, one after the other with them.
    pub(super) each: i64,
    pub(super) late: bool,
}

impl Shape {
    /// Rows of a block at a time.
    pub(super) fn abreast(&self) -> i64 {
        self.threads / self.group
    }

    pub(super) fn blocks(&self) -> i64 {
        ceil(self.rows, self.each)
    }

    /// Blocks that a multiprocessor has registers for at least, 0 for any number: one that has a row alone
    /// waits while its statistics are combined, and blocks with late results are to be in one wave.
    pub(super) fn blocks_of_a_multiprocessor(&self) -> u32 {
        match self.paired {
            true => 2,
            false if self.late && self.unrolled => (512 / self.threads) as u32,
            false => 0,
        }
    }

    /// Whether all threads of a row have as many items.
    pub(super) fn is_even(&self) -> bool {
        self.items % self.group == 0
    }

    /// Whether some threads may be without a row.
    pub(super) fn ragged(&self) -> bool {
        self.rows % self.abreast() != 0
    }
}

/// What a thread keeps of a row in registers.
struct Kept {
    /// Values that several passes need.
    keys: FxHashSet<Key>,
    /// Bytes of those of one point that live from one pass to a later one.
    bytes: i64,
    /// Values that a single pass loads, and their bytes for one point. A thread keeps these too if there is
    /// room, so that all its loads are under way at once.
    once: FxHashSet<Key>,
    once_bytes: i64,
    /// Those of them that a later pass than the first loads, from the row: that pass would wait for them
    /// anew.
    later: FxHashSet<Key>,
    later_bytes: i64,
}

/// Which values a thread may keep for later passes over a row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keeps {
    /// What is loaded.
    Loads,
    /// What is loaded, and what is dear to compute.
    Dear,
    /// Everything. Later passes then read the last values that earlier ones could compute, and nothing from
    /// which these are computed: a residual stream in place of the three tensors that it is the sum of.
    All,
}

impl Kept {
    /// Values that several passes evaluate, of those that a thread may keep.
    fn of(graph: &Graph, space: &Space, keeps: Keeps) -> Self {
        let evaluated = |kept: FxHashSet<Key>| std::mem::take(&mut dry_run(graph, space, kept).evaluated);
        let several = |passes: u64| passes.count_ones() > 1;
        let loaded = |key: &Key| !space.loops.nest.uses_of(key.0).is_empty();
        let may = |key: &Key| match keeps {
            Keeps::Loads => loaded(key),
            Keeps::Dear => loaded(key) || is_expensive(&graph.def(key.0).op),
            Keeps::All => true,
        };
        let candidates = evaluated(FxHashSet::default()).into_iter();
        let candidates = candidates.filter(|(key, passes)| several(*passes) && may(key));
        let candidates: FxHashSet<Key> = candidates.map(|(key, _)| key).collect();
        // Where these are kept, fewer passes need the values from which they are computed.
        let all = evaluated(candidates.clone());
        let size = |key: &Key| {
            let dtype = graph.dtype(key.0);
            // What is computed is in a register of its own.
            let held = if loaded(key) {
                dtype.size()
            } else {
                dtype.compute().size().max(4)
            };
            held as i64
        };
        let own = || {
            all.iter()
                .filter(|(key, passes)| several(**passes) && candidates.contains(*key))
        };
        let live_behind = |pass: u32| -> i64 {
            let lives = |passes: u64| passes.trailing_zeros() <= pass && passes >> (pass + 1) != 0;
            let alive = own().filter(|(_, passes)| lives(**passes));
            alive.map(|(key, _)| size(key)).sum()
        };
        let at_loaded = |key: &Key| key.1.iter().any(Index::has_data);
        let once = all
            .iter()
            .filter(|(key, passes)| !several(**passes) && loaded(key) && !at_loaded(key));
        let rows = space.loops.row_set();
        let is_later = |(key, passes): &(&Key, &u64)| passes.trailing_zeros() > 0 && vars(&key.1) & rows != 0;
        let later: FxHashSet<Key> = once
            .clone()
            .filter(is_later)
            .map(|(key, _)| key.clone())
            .collect();
        let once: FxHashSet<Key> = once.map(|(key, _)| key.clone()).collect();
        Self {
            bytes: (0..63).map(live_behind).max().unwrap_or(0),
            keys: own().map(|(key, _)| key.clone()).collect(),
            once_bytes: once.iter().map(size).sum(),
            once,
            later_bytes: later.iter().map(size).sum(),
            later,
        }
    }
}

/// Shares out the rows, and says which values passes keep for later ones.
pub(super) fn shape(graph: &Graph, space: &Space) -> (Shape, FxHashSet<Key>) {
    let lates: Vec<Late> = Writer::new(graph, space)
        .lates()
        .into_iter()
        .map(|(_, late)| late)
        .collect();
    let all = kept(graph, space, &lates);
    if all.bytes == 0 && lates.is_empty() && space.loops.row_count() == 1 {
        return (sole(space), FxHashSet::default());
    }
    let (group, unrolled) = group(space, &lates, all.bytes);
    if unrolled && group == ALONE && held(space, group, all.bytes) > KEPT / 2 {
        let loads = Kept::of(graph, space, Keeps::Loads);
        if held(space, group, loads.bytes) <= KEPT / 2 && fits(space, &lates, group, loads.bytes) {
            let shape = Shape {
                paired: true,
                ..complete(space, &lates, group, true)
            };
            return (shape, loads.keys);
        }
    }
    if unrolled {
        let mut keys = all.keys;
        if fits(space, &lates, group, all.bytes + all.once_bytes) {
            keys.extend(all.once);
        } else if fits(space, &lates, group, all.bytes + all.later_bytes) {
            keys.extend(all.later);
        }
        return (complete(space, &lates, group, true), keys);
    }
    // Dear values are computed again before elements are loaded again.
    let loads = Kept::of(graph, space, Keeps::Loads);
    let (group, unrolled) = self::group(space, &lates, loads.bytes);
    (complete(space, &lates, group, unrolled), loads.keys)
}

/// What a thread keeps if there is room: everything that later passes read, which spares them the arithmetic,
/// unless that takes more registers than what is loaded or dear, and these are few or many.
fn kept(graph: &Graph, space: &Space, lates: &[Late]) -> Kept {
    let (all, dear) = [Keeps::All, Keeps::Dear]
        .map(|keeps| Kept::of(graph, space, keeps))
        .into();
    let (threads, unrolled) = group(space, lates, all.bytes);
    let has_room = || {
        unrolled
            && threads == group(space, lates, dear.bytes).0
            && held(space, threads, all.bytes) <= KEPT / 2
    };
    if all.bytes <= dear.bytes || has_room() {
        all
    } else {
        dear
    }
}

/// The bytes of the widest accumulator of a column; 0 if there is none.
fn column_bytes(lates: &[Late]) -> i64 {
    let columns = lates.iter().filter(|late| late.by_column());
    columns.map(|late| late.dtype.size() as i64).max().unwrap_or(0)
}

/// Bytes that a thread of `group` holds of a row, if it keeps `kept` bytes of a point.
fn held(space: &Space, group: i64, kept: i64) -> i64 {
    let items = space.loops.row_length() / space.width;
    ceil(items, group) * space.width * kept
}

/// Whether what a thread of `group` holds of a row fits into registers, if it keeps `kept` bytes of a point.
fn fits(space: &Space, lates: &[Late], group: i64, kept: i64) -> bool {
    let columns = lates.iter().filter(|late| late.by_column());
    let each = kept + columns.map(|late| late.dtype.size() as i64).sum::<i64>();
    let items = space.loops.row_length() / space.width;
    let turns = ceil(items, group);
    let most = match group {
        32 if items % 32 == 0 => KEPT_BY_WARP,
        // A thread of a large block has fewer registers.
        1024.. => KEPT / 2,
        _ => KEPT,
    };
    let shared = items * space.width * column_bytes(lates);
    turns <= TURNS && turns * space.width * each <= most && shared <= SHARED
}

/// How many threads share a row, and whether what each holds of it fits into registers if it keeps `kept`
/// bytes of a point.
fn group(space: &Space, lates: &[Late], kept: i64) -> (i64, bool) {
    let rows = space.loops.row_count();
    let items = space.loops.row_length() / space.width;
    let fits = |group: i64| fits(space, lates, group, kept);
    if space
        .vector
        .is_some_and(|vector| space.loops.rows.contains(&vector))
    {
        return (1, fits(1));
    }
    let turns = |group: i64| ceil(items, group);
    let mut group = power_of_two(items).min(32);
    // Few rows are shared by more threads, so that all multiprocessors have work.
    while group < 1024 && turns(group) > 1 && (!fits(group) || turns(group) > 8 || rows * group < FILL) {
        group *= 2;
    }
    (group, fits(group))
}

/// The shape of a sole row that is read once: the least and the greatest of some indices. The one block takes
/// as long as its launch whatever its shape is. So there are few shapes, and rows of many lengths share a
/// kernel.
fn sole(space: &Space) -> Shape {
    let items = space.loops.row_length() / space.width;
    let group = match items {
        ..=32 => 32,
        33..=1024 => 256,
        _ => 1024,
    };
    Shape {
        group,
        threads: group,
        items,
        turns: ceil(items, group),
        unrolled: false,
        paired: false,
        rows: 1,
        each: 1,
        late: false,
    }
}

/// The rest of the shape.
fn complete(space: &Space, lates: &[Late], group: i64, unrolled: bool) -> Shape {
    let rows = space.loops.row_count();
    let items = space.loops.row_length() / space.width;
    let bytes = items * space.width * column_bytes(lates);
    // Late results that do not fit are accumulated in memory, by one group a block.
    let group = if !unrolled && bytes > 0 { 1024 } else { group };
    let late = !lates.is_empty();
    // Blocks with late results are few: there is no more than one wave of them, and each leaves a part of
    // every result.
    let mut threads = match group {
        ..=32 => 256,
        _ if late => group.max(256),
        _ => group,
    };
    while threads > group.max(64) && rows * group / threads < 264 {
        threads /= 2;
    }
    while threads > group.max(32) && threads / group * bytes > SHARED {
        threads /= 2;
    }
    let abreast = threads / group;
    let each = match late {
        false => abreast,
        true => {
            // As many threads as [`Shape::blocks_of_a_multiprocessor`] has registers for.
            let most = if unrolled { 512 } else { 1024 };
            let fill = (132 * most / threads).min(1056).min(rows / abreast.max(8));
            let blocks = fill.max(rows / (abreast * LONGEST)).max(1);
            ceil(ceil(rows, blocks), abreast) * abreast
        }
    };
    Shape {
        group,
        threads,
        items,
        turns: ceil(items, group),
        unrolled,
        paired: false,
        rows,
        each,
        late,
    }
}
