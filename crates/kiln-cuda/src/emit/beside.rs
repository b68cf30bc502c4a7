//! Small kernels side by side.
//!
//! A launch costs one to two microseconds, and a kernel of a few blocks leaves most of the device idle. Small kernels that do not depend on each other become one launch,
//! in which each has blocks of its own. Kernels of a single block that do depend on each other become one *lane* of such a launch: one block runs them in turn.
//!
//! A small kernel waits in a bundle. It moves behind every kernel that follows it, until one touches memory that it writes, or writes memory that it touches: then the bundle is
//! launched first. What kernels touch is known from the finished plan, so that memory which serves several values in turn counts as one. Kernels move later and never earlier, and
//! two that touch the same bytes keep their order:
//!
//! ```text
//! schedule   a  P  b  Q  c  d  R     a, b, c, d small; d reads what c writes; R reads what d writes; P, Q, R large
//! calls      P  Q  [a | b | c d]  R
//! ```

use std::fmt::Write as _;

use crate::code::{FunctionText, Pointer};

/// Most pointers of a bundle: all arguments of a kernel travel in 4 KiB.
const POINTERS: usize = 240;
/// Most different texts in a bundle: the registers of a thread are those of the hungriest.
const TEXTS: usize = 6;
/// Most kernels that one block runs in turn.
const TURNS: usize = 8;

/// Memory that nothing but itself overlaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Space {
    /// Intermediate values.
    Arena,
    /// A tensor argument, and the output that takes its memory over.
    Input(u32),
    /// An output with memory of its own.
    Output(u32),
}

/// Bytes `start..end` of a space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range {
    pub space: Space,
    pub start: usize,
    pub end: usize,
}

impl Range {
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.space == other.space && self.start < other.end && other.start < self.end
    }
}

/// A kernel that may join a bundle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Small<'a> {
    pub text: &'a FunctionText,
    pub pointers: usize,
    pub blocks: u32,
}

/// A kernel of the schedule, as far as its place among the others goes.
#[derive(Clone, Debug)]
pub(super) struct Entry<'a> {
    pub reads: Vec<Range>,
    pub writes: Vec<Range>,
    /// The one of these that is working memory of products alone.
    pub workspace: Option<Range>,
    /// None for kernels that stay where they are.
    pub small: Option<Small<'a>>,
    /// Whether everything before must be over when what follows begins.
    pub barrier: bool,
    /// Whether it is a collective of all ranks, or the wait for one.
    pub across: bool,
    /// Whether another kernel runs it behind itself ([`super::after`]).
    pub taken: bool,
}

impl Entry<'_> {
    /// Whether the order of the two counts.
    pub(super) fn depends(&self, other: &Self) -> bool {
        let meet = |some: &[Range], others: &[Range]| {
            some.iter()
                .any(|one| others.iter().any(|other| one.overlaps(other)))
        };
        meet(&self.writes, &other.writes)
            || meet(&self.writes, &other.reads)
            || meet(&self.reads, &other.writes)
    }
}

/// Kernels that wait. Those of different lanes are independent.
struct Bundle<'a> {
    /// Threads of a block.
    threads: u32,
    /// Several kernels in a lane have one block each.
    lanes: Vec<Vec<usize>>,
    texts: Vec<&'a FunctionText>,
    pointers: usize,
}

impl<'a> Bundle<'a> {
    fn new(threads: u32) -> Self {
        Self {
            threads,
            lanes: Vec::new(),
            texts: Vec::new(),
            pointers: 0,
        }
    }

    fn has_room(&self, small: &Small<'a>) -> bool {
        self.threads == small.text.threads
            && self.pointers + small.pointers <= POINTERS
            && (self.texts.len() < TEXTS || self.texts.contains(&small.text))
    }

    /// Adds kernel `number`, which comes after all of `lanes`; whether it could.
    fn add(&mut self, number: usize, lanes: &[usize], entries: &[Entry<'a>]) -> bool {
        let Some(small) = &entries[number].small else {
            return false;
        };
        let single = |number: &usize| entries[*number].small.is_some_and(|small| small.blocks == 1);
        let before = || lanes.iter().flat_map(|&lane| &self.lanes[lane]);
        let in_turn =
            lanes.is_empty() || (before().all(single) && single(&number) && before().count() < TURNS);
        if !self.has_room(small) || !in_turn {
            return false;
        }
        let mut lane: Vec<usize> = before().copied().collect();
        // The order of the schedule.
        lane.sort_unstable();
        lane.push(number);
        let mut at = 0;
        self.lanes.retain(|_| {
            at += 1;
            !lanes.contains(&(at - 1))
        });
        self.lanes.push(lane);
        self.pointers += small.pointers;
        if !self.texts.contains(&small.text) {
            self.texts.push(small.text);
        }
        true
    }

    /// The lanes that come before `entry`.
    fn lanes_before(&self, entry: &Entry<'_>, entries: &[Entry<'_>]) -> Vec<usize> {
        let depends = |lane: &Vec<usize>| lane.iter().any(|&it| entry.depends(&entries[it]));
        let numbered = self.lanes.iter().enumerate();
        numbered
            .filter(|(_, lane)| depends(lane))
            .map(|(number, _)| number)
            .collect()
    }
}

/// What is launched at once: lanes side by side, each of kernels in turn.
pub(super) type Group = Vec<Vec<usize>>;

/// The kernels in the order of their launches.
pub(super) fn groups(entries: &[Entry<'_>]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut waiting: Vec<Bundle<'_>> = Vec::new();
    let own = entries.iter().enumerate().filter(|(_, entry)| !entry.taken);
    for (number, entry) in own {
        let threads = entry.small.map(|small| small.text.threads);
        let mut added = false;
        // Bundles are independent of each other: they are launched in any order.
        let flushed = waiting.extract_if(.., |bundle| {
            let lanes = bundle.lanes_before(entry, entries);
            if Some(bundle.threads) == threads {
                added = bundle.add(number, &lanes, entries);
                !added
            } else {
                !lanes.is_empty()
            }
        });
        groups.extend(flushed.map(|bundle| bundle.lanes));
        match threads {
            None => groups.push(vec![vec![number]]),
            Some(threads) if !added => {
                let mut bundle = Bundle::new(threads);
                bundle.add(number, &[], entries);
                waiting.push(bundle);
            }
            Some(_) => {}
        }
        if entry.barrier {
            groups.extend(waiting.drain(..).map(|bundle| bundle.lanes));
        }
    }
    groups.extend(waiting.into_iter().map(|bundle| bundle.lanes));
    groups
}

/// Whether the kernel can be a function that is told its block.
pub(super) fn is_plain(text: &FunctionText) -> bool {
    !text.device_only
        && !text.helpers.contains("blockIdx")
        && ![&text.helpers, &text.body].iter().any(|text| {
            text.contains("gridDim") || text.contains("__shared__") || text.contains("kiln_shared")
        })
}

/// A launch whose arguments have addresses.
#[derive(Clone, Debug)]
pub(super) struct Placed<'a> {
    pub text: &'a FunctionText,
    /// Whether it does nothing once an index was out of range.
    pub guarded: bool,
    pub grid: [u32; 3],
    pub arguments: Vec<Pointer>,
}

/// One launch for `lanes`, whose kernels have equal numbers of threads. Its text looks at the mark of a stopped step itself, where a kernel must.
pub(super) fn together(lanes: &[Vec<Placed<'_>>]) -> (FunctionText, [u32; 3], Vec<Pointer>) {
    let shape = |lane: &[Placed<'_>]| -> Vec<(FunctionText, [u32; 3], bool)> {
        let kernels = lane.iter();
        kernels.map(|it| (it.text.clone(), it.grid, it.guarded)).collect()
    };
    let key = |lane: &[Placed<'_>]| -> Vec<(String, String, [u32; 3], bool)> {
        let text = |text: &FunctionText| (text.body.clone(), text.helpers.clone());
        let kernels = lane.iter().map(|it| (text(it.text), it.grid, it.guarded));
        kernels
            .map(|((body, helpers), grid, guarded)| (body, helpers, grid, guarded))
            .collect()
    };
    // Bundles of the same kernels in another order are one function.
    let mut order: Vec<&Vec<Placed<'_>>> = lanes.iter().collect();
    order.sort_by_cached_key(|lane| key(lane));
    let mut writer = Writer {
        text: FunctionText {
            helpers: "struct @_place { unsigned x, y, z; };\n".into(),
            threads: lanes[0][0].text.threads,
            body: "unsigned kiln_first = blockIdx.x;\n".into(),
            ..FunctionText::default()
        },
        functions: Vec::new(),
        arguments: Vec::new(),
        blocks: 0,
    };
    for run in order.chunk_by(|a, b| shape(a) == shape(b)) {
        writer.run(run);
    }
    (writer.text, [writer.blocks, 1, 1], writer.arguments)
}

/// A launch of many kernels in the making.
struct Writer<'a> {
    text: FunctionText,
    /// The kernels that are functions by now.
    functions: Vec<&'a FunctionText>,
    arguments: Vec<Pointer>,
    blocks: u32,
}

impl<'a> Writer<'a> {
    /// The name of a kernel's function.
    fn function(&mut self, text: &'a FunctionText) -> String {
        let known = self.functions.iter().position(|known| *known == text);
        let number = known.unwrap_or(self.functions.len());
        let name = format!("@_k{number}");
        if known.is_none() {
            self.functions.push(text);
            // In a lane a kernel reads what another one has written: nothing is constant as long as the launch runs.
            let parameters = text.parameters.iter().fold(String::new(), |list, it| {
                list + ", " + &it.replace("__restrict__ ", "")
            });
            let _ = write!(
                self.text.helpers,
                "{}\ninline void {name}(const @_place& kiln_place{parameters})\n{{\n{}\n}}\n",
                text.helpers.replace('@', &name),
                text.body.replace('@', &name).replace("blockIdx", "kiln_place")
            );
        }
        name
    }

    /// Lanes of the same kernels, each with its own pointers.
    fn run(&mut self, lanes: &[&Vec<Placed<'a>>]) {
        let names: Vec<String> = lanes[0].iter().map(|placed| self.function(placed.text)).collect();
        let types: Vec<String> = lanes[0].iter().flat_map(|placed| types(placed.text)).collect();
        let [x, y, z] = lanes[0][0].grid;
        let each = x * y * z;
        let all = each * lanes.len() as u32;
        let mut body = format!("if (kiln_first < {all}u) {{\n");
        for (at, ty) in types.iter().enumerate() {
            let _ = writeln!(body, "    {ty} p{at};");
        }
        let _ = writeln!(body, "    switch (kiln_first / {each}u) {{");
        for (number, lane) in lanes.iter().enumerate() {
            let _ = match number + 1 == lanes.len() {
                true => write!(body, "    default:"),
                false => write!(body, "    case {number}:"),
            };
            let pointers = lane.iter().flat_map(|placed| &placed.arguments);
            for (at, (ty, pointer)) in types.iter().zip(pointers).enumerate() {
                let parameter = format!("k{}", self.arguments.len());
                let _ = write!(body, " p{at} = {parameter};");
                self.text.parameters.push(format!("{ty} {parameter}"));
                self.arguments.push(pointer.clone());
            }
            let _ = writeln!(body, " break;");
        }
        let place = format!(
            "{{kiln_first % {x}u, kiln_first / {x}u % {y}u, kiln_first / {}u}}",
            x * y
        );
        let _ = writeln!(body, "    }}\n    kiln_first %= {each}u;");
        let mut first = 0;
        for (turn, (name, placed)) in names.iter().zip(lanes[0]).enumerate() {
            let own = first..first + placed.arguments.len();
            first = own.end;
            let list = own.fold(String::new(), |list, at| format!("{list}, p{at}"));
            let wait = if turn == 0 { "" } else { "    __syncthreads();\n" };
            let look = if placed.guarded {
                "if (!*kiln_stopped) "
            } else {
                ""
            };
            let _ = writeln!(body, "{wait}    {look}{name}({place}{list});");
        }
        let _ = writeln!(body, "    return;\n}}\nkiln_first -= {all}u;");
        self.text.body.push_str(&body);
        self.blocks += all;
    }
}

/// The types of a kernel's parameters.
pub(super) fn types(text: &FunctionText) -> impl Iterator<Item = String> + '_ {
    text.parameters.iter().map(|parameter| {
        let (ty, _) = parameter.rsplit_once(' ').unwrap_or((parameter, ""));
        ty.replace("__restrict__", "").trim().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(body: &str) -> FunctionText {
        FunctionText {
            parameters: vec![
                "const float* __restrict__ x".into(),
                "float* __restrict__ y".into(),
            ],
            body: body.into(),
            threads: 64,
            ..FunctionText::default()
        }
    }

    fn arena(start: usize, end: usize) -> Range {
        let space = Space::Arena;
        Range { space, start, end }
    }

    fn entry<'a>(
        reads: &[(usize, usize)],
        writes: &[(usize, usize)],
        small: Option<&'a FunctionText>,
    ) -> Entry<'a> {
        let ranges = |list: &[(usize, usize)]| list.iter().map(|&(start, end)| arena(start, end)).collect();
        Entry {
            workspace: None,
            reads: ranges(reads),
            writes: ranges(writes),
            small: small.map(|text| Small {
                text,
                pointers: text.parameters.len(),
                blocks: 2,
            }),
            barrier: false,
            across: false,
            taken: false,
        }
    }

    #[test]
    fn independent_kernels_wait_for_each_other() {
        let text = text("y[0] = x[0];");
        let small = Some(&text);
        let entries = [
            entry(&[(0, 4)], &[(256, 260)], small),
            entry(&[(0, 4)], &[(512, 4096)], None),
            entry(&[(0, 4)], &[(4096, 4100)], small),
            entry(&[(600, 700)], &[(8192, 9000)], None),
        ];
        assert_eq!(
            groups(&entries),
            [vec![vec![1]], vec![vec![3]], vec![vec![0], vec![2]]]
        );
    }

    #[test]
    fn nobody_passes_a_kernel_that_it_shares_bytes_with() {
        let text = text("y[0] = x[0];");
        let small = Some(&text);
        let first = entry(&[(0, 4)], &[(256, 260)], small);
        // Reads the result, overwrites it, overwrites the operand; and one byte beside each.
        let touching = [
            entry(&[(259, 300)], &[], None),
            entry(&[], &[(200, 257)], None),
            entry(&[], &[(0, 1)], None),
        ];
        for second in touching {
            for small in [None, small] {
                let second = Entry {
                    small: entry(&[], &[], small).small,
                    ..second.clone()
                };
                assert_eq!(groups(&[first.clone(), second]), [[[0]], [[1]]]);
            }
        }
        let beside = [
            entry(&[(260, 300)], &[], None),
            entry(&[], &[(200, 256)], None),
            entry(&[(0, 4)], &[(4, 8)], None),
        ];
        for second in beside {
            assert_eq!(groups(&[first.clone(), second]), [[[1]], [[0]]]);
        }
        let mut other_space = entry(&[(256, 260)], &[], None);
        other_space.reads[0].space = Space::Input(0);
        assert_eq!(groups(&[first.clone(), other_space]), [[[1]], [[0]]]);
        let barrier = Entry {
            barrier: true,
            ..entry(&[], &[], None)
        };
        assert_eq!(groups(&[first.clone(), barrier, first]), [[[1]], [[0]], [[2]]]);
    }

    #[test]
    fn blocks_of_a_bundle_have_as_many_threads_and_its_arguments_room() {
        let (text, other) = (
            text("y[0] = x[0];"),
            FunctionText {
                threads: 128,
                ..text("y[0] = 1;")
            },
        );
        let at = |number: usize| [(4 * number, 4 * number + 4)];
        let count = POINTERS / 2 + 1;
        let many: Vec<Entry<'_>> = (0..count)
            .map(|number| entry(&[], &at(number), Some(&text)))
            .collect();
        let made = groups(&many);
        assert_eq!(made.iter().map(Vec::len).collect::<Vec<_>>(), [POINTERS / 2, 1]);
        let mixed: Vec<Entry<'_>> = (0..6)
            .map(|number| {
                entry(
                    &[],
                    &at(number),
                    Some(if number % 2 == 0 { &text } else { &other }),
                )
            })
            .collect();
        assert_eq!(groups(&mixed), [[[0], [2], [4]], [[1], [3], [5]]]);
    }

    #[test]
    fn bundles_of_the_same_kernels_are_one_function() {
        let (one, other) = (text("y[0] = x[0];"), text("y[blockIdx.x] = @_f(x[0]);"));
        let place = |text, number| Placed {
            text,
            guarded: false,
            grid: [2, 1, 1],
            arguments: vec![Pointer::To(crate::code::Address::Scalar(number)); 2],
        };
        let alone = |text, number| vec![place(text, number)];
        let (a, grid, arguments) = together(&[alone(&one, 0), alone(&other, 1), alone(&one, 2)]);
        let (b, ..) = together(&[alone(&other, 3), alone(&one, 4), alone(&one, 5)]);
        assert_eq!(a, b);
        assert_eq!((grid, arguments.len(), a.parameters.len()), ([6, 1, 1], 6, 6));
        assert!(a.helpers.contains("@_k1_f(x[0])"), "{}", a.helpers);
        assert!(!a.helpers.contains("blockIdx"));
    }

    #[test]
    fn single_blocks_that_depend_on_each_other_take_turns() {
        let text = text("y[0] = x[0];");
        let single = |reads: &[(usize, usize)], writes: &[(usize, usize)]| {
            let mut entry = entry(reads, writes, Some(&text));
            entry.small = entry.small.map(|small| Small { blocks: 1, ..small });
            entry
        };
        let (a, b) = (single(&[], &[(0, 4)]), single(&[(0, 4)], &[(4, 8)]));
        let (other, both) = (single(&[], &[(64, 68)]), single(&[(4, 8), (64, 68)], &[(72, 76)]));
        assert_eq!(
            groups(&[a.clone(), b.clone(), other.clone()]),
            [[vec![0, 1], vec![2]]]
        );
        // Two lanes that somebody waits for become one, in the order of the schedule.
        assert_eq!(
            groups(&[a.clone(), other.clone(), b.clone(), both]),
            [[vec![0, 1, 2, 3]]]
        );
        // A kernel of several blocks waits for a launch.
        let several = entry(&[(0, 4)], &[(4, 8)], Some(&text));
        assert_eq!(groups(&[a.clone(), several.clone()]), [[[0]], [[1]]]);
        assert_eq!(groups(&[several, single(&[(4, 8)], &[])]), [[[0]], [[1]]]);
        let chain: Vec<Entry<'_>> = (0..TURNS + 1).map(|_| a.clone()).collect();
        let made = groups(&chain);
        assert_eq!(made.len(), 2);
        assert_eq!(made[0], [(0..TURNS).collect::<Vec<_>>()]);
    }
}
