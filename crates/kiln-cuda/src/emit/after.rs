//! Small kernels behind sums of columns.
//!
//! What a batch norm sums up of a picture ends in a kernel that adds up what blocks have left of each channel
//! ([`Columns`]). What is computed of these sums for each channel is a kernel of its own, of one block, and
//! everything behind it waits for both. Where each of its threads reads no other sums than those of its own
//! channels ([`Along`]), the blocks that add up run it, each for its own columns:
//!
//! ```text
//! schedule   convolution, S = its sums | P = f(S) | .. | reads P
//! calls      convolution, S then f(S)             | .. | reads P
//! ```
//!
//! The second kernel then runs earlier than it was planned, where its operands are ready and its results
//! overwrite nothing ([`partners`]).

use super::beside::{self, Entry, Range};
use super::nest::Columns;
use super::{Argument, Launch};
use crate::code::FunctionText;

/// What a launch may do together with another one.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Role {
    /// Nothing.
    #[default]
    Alone,
    /// It ends a kernel, and adds up columns.
    Sums(Columns),
    /// It has one axis, and each thread reads and writes elements of its own place alone.
    Along(Along),
}

/// The statements of a kernel along one axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Along {
    /// What a thread does at place `t`.
    pub statements: String,
    /// The type of `t`.
    pub index: &'static str,
    /// Elements of a place.
    pub width: i64,
    /// Elements of the axis.
    pub extent: i64,
}

/// What a kernel of the schedule is to this pass.
pub(super) struct Candidate<'a> {
    /// Its last launch.
    pub last: &'a Launch,
    /// Whether it has others.
    pub has_more: bool,
    /// What the last launch writes, if it adds up sums.
    pub results: Vec<Range>,
    /// The kernel's working memory.
    pub scratch: Range,
}

/// Most kernels between the two.
const FAR: usize = 8;

/// For each kernel the one that runs behind it, in its last launch, and which it then stands for: its place
/// among others is that of both.
pub(super) fn partners(
    entries: &mut [Entry<'_>],
    candidates: &[Option<Candidate<'_>>],
) -> Vec<Option<usize>> {
    let mut partners = vec![None; entries.len()];
    for first in 0..entries.len() {
        let Some(sums) = &candidates[first] else { continue };
        if !matches!(sums.last.role, Role::Sums(_)) || entries[first].barrier {
            continue;
        }
        let behind = first + 1..entries.len().min(first + 2 + FAR);
        let Some(second) = behind.into_iter().find(|&it| reads(&entries[it], sums)) else {
            continue;
        };
        let Some(then) = candidates[second].as_ref().filter(|then| !then.has_more) else {
            continue;
        };
        let passed = &entries[first + 1..second];
        let in_the_way = |other: &Entry<'_>| other.barrier || other.taken || entries[second].depends(other);
        let is_ready = !entries[second].barrier && !passed.iter().any(in_the_way);
        if is_ready && fits(sums, then, &entries[second]) {
            let Entry { reads, writes, .. } = entries[second].clone();
            entries[second].taken = true;
            entries[first].reads.extend(reads);
            entries[first].writes.extend(writes);
            partners[first] = Some(second);
        }
    }
    partners
}

/// Whether a kernel reads what `sums` adds up.
fn reads(entry: &Entry<'_>, sums: &Candidate<'_>) -> bool {
    let mut reads = entry.reads.iter();
    reads.any(|read| sums.results.iter().any(|result| result.overlaps(read)))
}

/// Whether blocks that add up columns can go on with `then`, the kernel of `entry`.
fn fits(sums: &Candidate<'_>, then: &Candidate<'_>, entry: &Entry<'_>) -> bool {
    let (Role::Sums(columns), Role::Along(along)) = (&sums.last.role, &then.last.role) else {
        return false;
    };
    // Other blocks still read what they have left, and a sum is read at its own place alone.
    let same_places = entry.reads.iter().all(|read| {
        let mut results = sums.results.iter();
        results.all(|result| result == read || !result.overlaps(read))
    });
    let overwrites = entry.writes.iter().any(|write| {
        write.overlaps(&sums.scratch) || sums.results.iter().any(|result| result.overlaps(write))
    });
    let plain = |argument: &Argument| matches!(argument, Argument::Buffer(_) | Argument::Scalar(_));
    columns.has(along) && same_places && !overwrites && then.last.arguments.iter().all(plain)
}

/// The launch that adds up `sums` and goes on with `then`, which are partners.
pub(super) fn together(sums: &Launch, then: &Launch) -> Launch {
    let (Role::Sums(columns), Role::Along(along)) = (&sums.role, &then.role) else {
        unreachable!("partners are sums and what goes along them")
    };
    let Along {
        statements, index, ..
    } = along;
    // Sums that were just written are read here.
    let own = then
        .text
        .parameters
        .iter()
        .map(|it| it.replace("__restrict__ ", ""));
    let own: Vec<String> = own.collect();
    let typed = beside::types(&then.text)
        .enumerate()
        .map(|(at, ty)| format!("{ty} t{at}"));
    let passed: String = (0..own.len()).map(|at| format!(", t{at}")).collect();
    let helpers = format!(
        "{}\ninline void @_then(const {index} t, {})\n{{\n{statements}\n}}\n",
        then.text.helpers,
        own.join(", "),
    );
    let (body, threads) = columns.body(Some(&format!("@_then(place{passed});")), along.width);
    Launch {
        text: FunctionText {
            helpers,
            parameters: sums.text.parameters.iter().cloned().chain(typed).collect(),
            body,
            threads,
            ..sums.text.clone()
        },
        grid: [sums.grid[0], 1, 1],
        shared_bytes: 0,
        arguments: [&sums.arguments[..], &then.arguments].concat(),
        role: Role::Alone,
    }
}

#[cfg(test)]
mod tests {
    use kiln_graph::DType;
    use kiln_graph::op::ReduceOp;

    use super::super::beside::Space;
    use super::*;
    use crate::emit::Buffer;

    fn arena(start: usize, end: usize) -> Range {
        let space = Space::Arena;
        Range { space, start, end }
    }

    fn entry(reads: &[(usize, usize)], writes: &[(usize, usize)]) -> Entry<'static> {
        let ranges = |list: &[(usize, usize)]| list.iter().map(|&(start, end)| arena(start, end)).collect();
        Entry {
            reads: ranges(reads),
            writes: ranges(writes),
            workspace: None,
            small: None,
            barrier: false,
            across: false,
            taken: false,
        }
    }

    fn launch(role: Role) -> Launch {
        Launch {
            text: FunctionText {
                parameters: vec!["const float* __restrict__ a0".into(), "float* a1".into()],
                body: "a1[0] = a0[0];".into(),
                threads: 256,
                ..FunctionText::default()
            },
            grid: [1, 1, 1],
            shared_bytes: 0,
            arguments: vec![Argument::Scalar(0), Argument::Buffer(Buffer::Output(0))],
            role,
        }
    }

    /// Sums of 64 columns, and a kernel along `extent` elements.
    fn launches(extent: i64) -> [Launch; 2] {
        let columns = Columns::new(ReduceOp::Sum, DType::F32, DType::F32, 64, 100).and_another();
        let along = Along {
            statements: "a1[t] = a0[t];".into(),
            index: "kiln_u32",
            width: 4,
            extent,
        };
        [launch(Role::Sums(columns)), launch(Role::Along(along))]
    }

    /// Working memory of the sums, and the sums.
    const SCRATCH: (usize, usize) = (4096, 8192);
    const SUMS: (usize, usize) = (0, 256);

    fn found(mut entries: Vec<Entry<'_>>, [sums, then]: &[Launch; 2]) -> Vec<Option<usize>> {
        let last = entries.len() - 1;
        let candidates: Vec<_> = (0..entries.len())
            .map(|number| {
                let launch = match number {
                    0 => sums,
                    _ if number == last => then,
                    _ => return None,
                };
                Some(Candidate {
                    last: launch,
                    has_more: number == 0,
                    results: vec![arena(SUMS.0, SUMS.1)],
                    scratch: arena(SCRATCH.0, SCRATCH.1),
                })
            })
            .collect();
        partners(&mut entries, &candidates)
    }

    fn sums() -> Entry<'static> {
        entry(&[(10_000, 20_000)], &[SUMS, SCRATCH])
    }

    #[test]
    fn a_kernel_over_channels_is_behind_its_sums() {
        let both = launches(64);
        let then = entry(&[SUMS, (512, 768)], &[(1024, 1280)]);
        assert_eq!(found(vec![sums(), then.clone()], &both), [Some(1), None]);
        // It passes what it has nothing to do with.
        let other = entry(&[(10_000, 20_000)], &[(20_000, 30_000)]);
        assert_eq!(
            found(vec![sums(), other, then.clone()], &both),
            [Some(2), None, None]
        );
        let mut entries = [sums(), then];
        let candidate = |launch, has_more| {
            Some(Candidate {
                last: launch,
                has_more,
                results: vec![arena(SUMS.0, SUMS.1)],
                scratch: arena(SCRATCH.0, SCRATCH.1),
            })
        };
        partners(
            &mut entries,
            &[candidate(&both[0], true), candidate(&both[1], false)],
        );
        // The place of the first is that of both.
        assert!(entries[1].taken);
        assert!(
            entries[0].writes.contains(&arena(1024, 1280)) && entries[0].reads.contains(&arena(512, 768))
        );
    }

    #[test]
    fn memory_keeps_them_apart() {
        let both = launches(64);
        let then = || entry(&[SUMS, (512, 768)], &[(1024, 1280)]);
        let alone = |entries: Vec<Entry<'_>>| {
            let count = entries.len();
            assert_eq!(found(entries, &both), vec![None; count]);
        };
        // What other blocks still add up, or have added up.
        alone(vec![sums(), entry(&[SUMS], &[(4000, 4100)])]);
        alone(vec![sums(), entry(&[SUMS], &[SUMS])]);
        // A sum that does not lie along its places.
        alone(vec![sums(), entry(&[(0, 128)], &[(1024, 1280)])]);
        // A kernel between makes an operand, reads what is overwritten, or writes the same.
        alone(vec![sums(), entry(&[], &[(700, 800)]), then()]);
        alone(vec![sums(), entry(&[(1200, 1300)], &[]), then()]);
        alone(vec![sums(), entry(&[], &[(1279, 1300)]), then()]);
        // A check is decided in front of it, or by it.
        let barrier = |entry: Entry<'static>| Entry {
            barrier: true,
            ..entry
        };
        alone(vec![sums(), barrier(entry(&[], &[])), then()]);
        alone(vec![barrier(sums()), then()]);
        alone(vec![sums(), barrier(then())]);
        // Too far away.
        let apart = |count: usize| -> Vec<Entry<'_>> {
            let between = (0..count).map(|_| entry(&[], &[]));
            std::iter::once(sums()).chain(between).chain([then()]).collect()
        };
        alone(apart(FAR + 1));
        assert_eq!(found(apart(FAR), &both)[0], Some(FAR + 1));
    }

    #[test]
    fn places_are_those_of_the_sums() {
        let then = entry(&[SUMS], &[(1024, 1280)]);
        for (extent, partner) in [(64, Some(1)), (32, None), (128, None)] {
            let both = launches(extent);
            assert_eq!(found(vec![sums(), then.clone()], &both), [partner, None]);
        }
        let [first, mut second] = launches(64);
        second.arguments[0] = Argument::Scratch(0);
        assert_eq!(found(vec![sums(), then], &[first, second]), [None, None]);
    }

    #[test]
    fn a_block_has_its_columns_of_all_sums() {
        let [first, second] = launches(64);
        let launch = together(&first, &second);
        // Eight columns of two sums, by lanes for each.
        assert_eq!(launch.grid, first.grid);
        assert_eq!(launch.text.threads % 16, 0);
        assert!(launch.text.threads <= 1024, "{}", launch.text.threads);
        assert_eq!(launch.text.parameters.len(), launch.arguments.len());
        assert!(
            launch
                .text
                .helpers
                .contains("@_then(const kiln_u32 t, const float* a0, float* a1)")
        );
        assert!(
            launch
                .text
                .body
                .contains("if (threadIdx.x < 2 && place < 16) @_then(place, t0, t1);")
        );
    }
}
