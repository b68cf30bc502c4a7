//! The verifier of plans: each kind of fault, planted in the plan of a real step, is found and named.

use kiln_compiler::index::Index;
use kiln_compiler::plan::verify::{PlanFault, verify};
use kiln_compiler::plan::{Place, Plan};
use kiln_compiler::schedule::{Buffer, KernelKind, Schedule};
use kiln_compiler::testing::Stub;
use kiln_compiler::{Options, Target, compile};
use kiln_graph::{Graph, Value};

/// A planned step to plant faults in.
struct Planned {
    graph: Graph,
    schedule: Schedule,
    plan: Plan,
    scratch: Vec<usize>,
}

impl Planned {
    /// One kernel for each operation, so that everything is in memory.
    fn new(text: &str) -> Self {
        Self::with(text, false)
    }

    fn with(text: &str, fuse: bool) -> Self {
        let graph = Graph::parse(text).unwrap_or_else(|error| panic!("{error}"));
        let options = Options {
            fuse,
            transform: false,
            ..Options::default()
        };
        let step = compile(&graph, &options, &Stub::default()).unwrap();
        let planned = Self {
            scratch: step.kernels.iter().map(|kernel| kernel.scratch.1).collect(),
            graph: step.graph,
            schedule: step.schedule,
            plan: step.plan,
        };
        assert_eq!(
            planned.fault(),
            None,
            "the plan is right before a fault is planted"
        );
        planned
    }

    fn fault(&self) -> Option<PlanFault> {
        let alignment = Stub::default().policy().alignment;
        verify(&self.graph, &self.schedule, &self.plan, &self.scratch, alignment).err()
    }

    /// The value that the text calls `%number`.
    fn value(&self, number: usize) -> Value {
        self.graph.values().nth(number).unwrap().0
    }

    fn buffer(&self, number: usize) -> Buffer {
        Buffer::Value(self.value(number))
    }

    /// The kernel that writes a value.
    fn writer(&self, number: usize) -> usize {
        let buffer = self.buffer(number);
        let mut kernels = self.schedule.kernels.iter();
        kernels
            .position(|kernel| kernel.writes.contains(&buffer))
            .unwrap()
    }

    fn put(&mut self, number: usize, place: Place) {
        let buffer = self.buffer(number);
        self.plan.places.insert(buffer, place);
    }

    fn place(&self, number: usize) -> Place {
        self.plan.places[&self.buffer(number)]
    }
}

/// `%2` and `%3` live at once; `%4` is a product, which reads `%3` as often as it has columns.
const CHAIN: &str = "graph @chain {
  %0 = parameter 0 : f32[8,8]
  %1 = parameter 1 : f32[8,8]
  %2 = exp %0 : f32[8,8]
  %3 = tanh %1 : f32[8,8]
  %4 = dot_general %3, %0 {a_contract=[1], b_contract=[0]} : f32[8,8]
  %5 = mul %4, %2 : f32[8,8]
  %6 = exp %5 : f32[8,8]
  return %6 (alias 1)
}";

#[test]
fn what_is_touched_has_a_place_inside_its_space() {
    let mut it = Planned::new(CHAIN);
    let gone = it.buffer(2);
    it.plan.places.remove(&gone);
    assert!(matches!(it.fault(), Some(PlanFault::Unplaced { buffer, .. }) if buffer == "%2"));

    let mut it = Planned::new(CHAIN);
    it.plan.arena_bytes -= 1;
    assert!(matches!(it.fault(), Some(PlanFault::Outside { .. })));

    let mut it = Planned::new(CHAIN);
    let Place::Arena(offset) = it.place(2) else {
        panic!("%2 is in the arena")
    };
    it.plan.arena_bytes += 64;
    it.put(2, Place::Arena(offset + 4));
    assert!(matches!(it.fault(), Some(PlanFault::Outside { what, .. }) if what == "%2"));

    let mut it = Planned::new(CHAIN);
    it.scratch[0] = it.plan.arena_bytes + 1;
    let fault = it.fault();
    assert!(
        matches!(fault, Some(PlanFault::Outside { what, .. }) if what.contains("scratch memory of kernel 0"))
    );
}

#[test]
fn what_lives_at_once_shares_no_bytes() {
    let mut it = Planned::new(CHAIN);
    it.put(3, it.place(2));
    assert!(matches!(it.fault(), Some(PlanFault::Shared { .. })));

    // Half of each.
    let mut it = Planned::new(CHAIN);
    let Place::Arena(offset) = it.place(2) else {
        panic!("%2 is in the arena")
    };
    it.plan.arena_bytes += 1024;
    it.put(3, Place::Arena(offset + 128));
    assert!(matches!(it.fault(), Some(PlanFault::Shared { .. })));

    let mut it = Planned::new(CHAIN);
    let Place::Arena(offset) = it.place(2) else {
        panic!("%2 is in the arena")
    };
    let between = it.writer(4);
    it.scratch[between] = 64;
    it.plan.scratch[between] = offset;
    let fault = it.fault();
    assert!(
        matches!(&fault, Some(PlanFault::Shared { one, other, .. }) if format!("{one}{other}").contains("scratch")),
        "{fault:?}"
    );
}

#[test]
fn memory_is_handed_on_elementwise_only() {
    let mut it = Planned::new(CHAIN);
    // The product reads all of a row of `%3` for each of its elements.
    it.put(4, it.place(3));
    let fault = it.fault();
    assert!(
        matches!(&fault, Some(PlanFault::HandedOn { from, to, .. }) if from == "%3" && to == "%4"),
        "{fault:?}"
    );
}

#[test]
fn kernels_run_after_those_they_read_from() {
    let mut it = Planned::new(CHAIN);
    let (maker, reader) = (it.writer(3), it.writer(4));
    it.schedule.kernels.swap(maker, reader);
    let fault = it.fault();
    assert!(
        matches!(&fault, Some(PlanFault::ReadEarly { buffer, .. }) if buffer == "%3"),
        "{fault:?}"
    );

    let mut it = Planned::new(CHAIN);
    let maker = it.writer(3);
    it.schedule.kernels[maker].writes.clear();
    assert!(matches!(it.fault(), Some(PlanFault::NeverWritten { buffer, .. }) if buffer == "%3"));
}

#[test]
fn outputs_are_made_and_arguments_are_not_written() {
    let mut it = Planned::new(CHAIN);
    it.put(6, Place::Arena(0));
    assert_eq!(it.fault(), Some(PlanFault::OutputNotMade { output: 0 }));

    let mut it = Planned::new(CHAIN);
    it.put(2, Place::Input(0));
    assert!(matches!(
        it.fault(),
        Some(PlanFault::WritesArgument { argument: 0, .. })
    ));
}

#[test]
fn arguments_are_taken_over_when_nobody_reads_them_any_more() {
    // `%6` takes over argument 1, which `%3` reads first. Were it argument 0, which the product reads..
    let why = |it: &Planned| match it.fault() {
        Some(PlanFault::TakenOver { why, .. }) => why.to_owned(),
        other => format!("{other:?}"),
    };
    let mut it = Planned::new(CHAIN);
    assert_eq!(it.plan.aliases, [Some(1)]);
    it.plan.aliases[0] = Some(0);
    assert_eq!(why(&it), "the graph does not allow it");

    // An argument that is read after the output is made.
    let text = CHAIN.replace(
        "return %6 (alias 1)",
        "%7 = tanh %1 : f32[8,8]\n  return %6 (alias 1), %7",
    );
    let mut it = Planned::new(&text);
    let (writer, reader) = (it.writer(6), it.writer(7));
    if reader < writer {
        let kernel = it.schedule.kernels.remove(reader);
        it.schedule.kernels.push(kernel);
        let bytes = it.scratch.remove(reader);
        it.scratch.push(bytes);
        let offset = it.plan.scratch.remove(reader);
        it.plan.scratch.push(offset);
    }
    let fault = it.fault();
    assert!(
        matches!(&fault, Some(PlanFault::Shared { space, .. }) if space == "argument 1"),
        "{fault:?}"
    );

    let twice = "graph @twice {
  %0 = parameter 0 : f32[8]
  %1 = parameter 1 : f32[8]
  %2 = exp %0 : f32[8]
  %3 = tanh %1 : f32[8]
  return %2 (alias 0), %3 (alias 1)
}";
    let mut it = Planned::new(twice);
    it.graph.outputs[1].alias = Some(0);
    it.plan.aliases[1] = Some(0);
    assert_eq!(why(&it), "another output does so too");

    let sizes = twice.replace("%1 = parameter 1 : f32[8]", "%1 = parameter 1 : f32[16]");
    let sizes = sizes.replace("tanh %1 : f32[8]", "tanh %1 : f32[16]");
    let mut it = Planned::new(&sizes);
    it.graph.outputs[0].alias = Some(1);
    it.graph.outputs[1].alias = None;
    it.plan.aliases = vec![Some(1), None];
    assert_eq!(why(&it), "their sizes differ");
}

#[test]
fn nothing_is_overwritten_before_every_index_is_looked_at() {
    let text = "graph @lookup {
  %0 = parameter 0 : f32[8,3]
  %1 = parameter 1 : i64[2]
  %2 = parameter 2 : f32[8]
  %3 = index_select %0, %1 {axis=0} : f32[2,3]
  %4 = exp %2 : f32[8]
  return %3, %4 (alias 2)
}";
    let mut it = Planned::new(text);
    assert_eq!(it.plan.aliases[1], Some(2));
    let update = it.graph.outputs[1].value;
    let mut kernels = it.schedule.kernels.iter();
    let at = kernels
        .position(|kernel| kernel.writes.contains(&Buffer::Value(update)))
        .unwrap();
    let kernel = it.schedule.kernels.remove(at);
    it.schedule.kernels.insert(0, kernel);
    let fault = it.fault();
    assert!(
        matches!(&fault, Some(PlanFault::TakenOver { argument: 2, why, .. }) if *why == "an index is looked at later"),
        "{fault:?}"
    );
}

#[test]
fn pieces_of_a_concatenation_are_apart_and_fill_it() {
    let text = "graph @joined {
  %0 = parameter 0 : f32[4,3]
  %1 = parameter 1 : f32[4,5]
  %2 = exp %0 : f32[4,3]
  %3 = tanh %1 : f32[4,5]
  %4 = concat %2, %3 {axis=1} : f32[4,8]
  return %4
}";
    let stores = |it: &mut Planned, change: &dyn Fn(&mut Index, usize)| {
        let mut number = 0;
        for kernel in &mut it.schedule.kernels {
            let KernelKind::Nest(nest) = &mut kernel.kind else {
                continue;
            };
            let value = it.graph.outputs[0].value;
            for store in nest
                .stores
                .iter_mut()
                .filter(|store| store.buffer == Buffer::Value(value))
            {
                change(&mut store.position, number);
                number += 1;
            }
        }
        assert_eq!(number, 2);
    };
    // The piece that begins at column 3 begins at column 2, and the other way round.
    for by in [-1, 1] {
        let mut it = Planned::new(text);
        stores(&mut it, &|position, _| {
            if position.offset() > 0 {
                *position = position.shift(by);
            }
        });
        let fault = it.fault();
        assert!(
            matches!(&fault, Some(PlanFault::Pieces { buffer, .. }) if buffer == "%4"),
            "{by}: {fault:?}"
        );
    }
    let mut it = Planned::new(text);
    for kernel in &mut it.schedule.kernels {
        if let KernelKind::Nest(nest) = &mut kernel.kind {
            nest.stores.retain(|store| store.position.offset() == 0);
        }
    }
    assert!(matches!(it.fault(), Some(PlanFault::Pieces { .. })));
}

/// A product that is made in its part of a concatenation: its place, and what it stores, are looked at, too.
#[test]
fn parts_are_where_their_buffer_has_them() {
    const JOINED: &str = "graph @joined {
  %0 = parameter 0 : f32[8,8]
  %1 = parameter 1 : f32[64]
  %2 = dot_general %0, %0 {a_contract=[1], b_contract=[0]} : f32[8,8]
  %3 = reshape %2 : f32[64]
  %4 = concat %1, %3 {axis=0} : f32[128]
  %5 = exp %4 : f32[128]
  return %5
}";
    let joined = || {
        let it = Planned::with(JOINED, true);
        let maker = it
            .schedule
            .kernels
            .iter()
            .position(|kernel| kernel.part.is_some());
        (it, maker.expect("the product is made in the concatenation"))
    };
    let (it, maker) = joined();
    let Place::Arena(whole) = it.place(4) else {
        panic!("%4 is in the arena")
    };
    assert_eq!(it.place(2), Place::Arena(whole + 256));
    assert_eq!(it.schedule.kernels[maker].writes, [it.buffer(4)]);

    let (mut it, _) = joined();
    it.put(2, Place::Arena(whole));
    assert!(matches!(it.fault(), Some(PlanFault::Part { part, start: 64, .. }) if part == "%2"));

    // Over the other part.
    let (mut it, maker) = joined();
    it.put(2, Place::Arena(whole));
    it.schedule.kernels[maker].part.as_mut().unwrap().start = 0;
    assert!(matches!(it.fault(), Some(PlanFault::Pieces { stored: 128, .. })));
}
