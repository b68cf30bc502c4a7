//! When the collectives of a step travel, and which part of that time no kernel hides.
//!
//! A step is a list of [`Event`]s of the thread that runs it: kernels, which take time, and starts and waits
//! of collectives, which take none themselves. A second thread carries collectives out, one after the other
//! in the order of their starts. [`Overlap::timeline`] plays both, with a time for each collective that the
//! caller knows:
//!
//! ```text
//!   step    ██ kernels ██ start a █ kernels █ start b ████ kernels ██ wait a ░░ wait b ▒ updates
//!   ranks                 ▓▓▓▓▓▓ a ▓▓▓▓▓▓ ▓▓▓▓▓▓▓▓▓▓▓▓ b ▓▓▓▓▓▓▓▓▓▓▓▓▓
//!                                                                   └─┘ exposed
//! ```

use std::collections::VecDeque;
use std::fmt;

use kiln_graph::{CollectiveKind, DType};
use rustc_hash::FxHashMap;

use crate::buckets::{Buckets, UNDER_WAY};
use crate::contract::{CollectiveCall, Contract, ExternCall};
use crate::report::KernelReport;

/// A collective of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Travel {
    /// What it computes.
    pub kind: CollectiveKind,
    /// Type of its elements.
    pub dtype: DType,
    /// Bytes of the operand on each rank.
    pub bytes: usize,
    /// How many tensors it joins; 1 for one that travels by itself.
    pub tensors: usize,
}

impl fmt::Display for Travel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} kB", self.kind, self.bytes.div_ceil(1000))
    }
}

/// A piece of the time of the thread that runs the step. Collectives are named by their position in
/// [`Overlap::travels`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Event {
    /// The kernel of this number, and its seconds.
    Kernel(usize, f64),
    /// The kernel of this number starts a collective.
    Start(usize, usize),
    /// The kernel of this number waits for a collective.
    Wait(usize, usize),
}

/// The kernels and collectives of a step, in order.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Overlap {
    /// What the step's thread does.
    pub events: Vec<Event>,
    /// The collectives, in the order of their starts.
    pub travels: Vec<Travel>,
}

/// When a collective travels, in seconds after the step's begin.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Times {
    /// When it was started.
    pub started: f64,
    /// When the thread of the ranks began it.
    pub begun: f64,
    /// When it was complete.
    pub arrived: f64,
    /// How long the step waited for it: exposed communication.
    pub exposed: f64,
}

/// A step with its collectives, played.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Timeline {
    /// Seconds of the step.
    pub step: f64,
    /// Seconds of its kernels where nothing disturbs them.
    pub kernels: f64,
    /// Of each collective.
    pub travels: Vec<Times>,
}

impl Timeline {
    /// Seconds that the step waits for collectives.
    pub fn exposed(&self) -> f64 {
        self.travels.iter().map(|times| times.exposed).sum()
    }
}

/// The call of another rank that each kernel makes; none for kernels that make none.
pub fn calls(contract: &Contract) -> Vec<Option<&ExternCall>> {
    let mut externs = contract.externs.iter().peekable();
    let call = |kernel: &KernelReport| {
        let [node] = &kernel.nodes[..] else { return None };
        let call = externs.next_if(|call| call.name == node.op)?;
        call.collective.is_some().then_some(call)
    };
    contract.kernels.iter().map(call).collect()
}

impl Overlap {
    /// The kernels of `contract`, which take `seconds` each, and its collectives. Without a collective there
    /// is nothing to overlap: kernels alone.
    pub fn of(contract: &Contract, seconds: &[f64]) -> Self {
        let mut overlap = Self::default();
        // Collectives by the node that starts them.
        let mut started: FxHashMap<u32, usize> = FxHashMap::default();
        for (number, call) in calls(contract).into_iter().enumerate() {
            let kernel = &contract.kernels[number];
            let Some(call) = call else {
                let seconds = seconds.get(number).copied().unwrap_or(0.0);
                overlap.events.push(Event::Kernel(number, seconds));
                continue;
            };
            let node = &kernel.nodes[0];
            if call.collective == Some(CollectiveCall::Wait) {
                let of = node.inputs.first().and_then(|input| started.get(input));
                overlap.events.extend(of.map(|&of| Event::Wait(number, of)));
                continue;
            }
            let at = overlap.travels.len();
            overlap.travels.push(travel(contract, kernel, call));
            overlap.events.push(Event::Start(number, at));
            match call.collective {
                Some(CollectiveCall::Run { .. }) => overlap.events.push(Event::Wait(number, at)),
                _ => drop(started.insert(node.node, at)),
            }
        }
        overlap
    }

    /// Seconds of all kernels.
    pub fn kernel_seconds(&self) -> f64 {
        let seconds = |event: &Event| match *event {
            Event::Kernel(_, seconds) => seconds,
            Event::Start(..) | Event::Wait(..) => 0.0,
        };
        self.events.iter().map(seconds).sum()
    }

    /// The same step with kernels that take `factor` times as long.
    pub fn scaled(mut self, factor: f64) -> Self {
        for event in &mut self.events {
            if let Event::Kernel(_, seconds) = event {
                *seconds *= factor;
            }
        }
        self
    }

    /// What traces call the kernels that start collectives and wait for them, by their numbers.
    pub fn names(&self) -> FxHashMap<usize, String> {
        let name = |event: &Event| match *event {
            Event::Kernel(..) => None,
            Event::Start(kernel, at) => Some((kernel, format!("start {}", self.travels[at]))),
            Event::Wait(kernel, of) => Some((kernel, format!("wait for {}", self.travels[of]))),
        };
        self.events.iter().filter_map(name).collect()
    }

    /// The same step with its sums in buckets of other sizes, as [`crate::buckets`] joins them. To be called
    /// on a step compiled with [`Buckets::NONE`]: what is joined here is not taken apart.
    ///
    /// A gradient is written where its bucket has it, so that joining costs nothing; where a kernel cannot do
    /// that the compiled step copies.
    pub fn joined(&self, sizes: &Buckets) -> Self {
        let bucket = self.buckets_of(sizes);
        let last = |at: usize| bucket.iter().rposition(|&other| other == bucket[at]);
        let first = |at: usize| bucket.iter().position(|&other| other == bucket[at]);
        let is_gather = |at: usize| self.travels[at].kind == CollectiveKind::AllGather;
        let mut joined = Self::default();
        // Gathers that nobody waits for yet.
        let mut under: VecDeque<Event> = VecDeque::new();
        for &event in &self.events {
            match event {
                Event::Kernel(..) => joined.events.push(event),
                Event::Start(kernel, at) if last(at) == Some(at) => {
                    joined.events.push(Event::Start(kernel, bucket[at]));
                    if is_gather(at) {
                        under.push_back(Event::Wait(kernel, bucket[at]));
                    }
                    if under.len() > UNDER_WAY {
                        joined.events.extend(under.pop_front());
                    }
                }
                Event::Wait(_, at) if is_gather(at) => {}
                Event::Wait(kernel, at) if first(at) == Some(at) => {
                    joined.events.push(Event::Wait(kernel, bucket[at]));
                }
                Event::Start(..) | Event::Wait(..) => {}
            }
        }
        joined.events.extend(under);
        for (at, travel) in self.travels.iter().enumerate() {
            match joined.travels.get_mut(bucket[at]) {
                Some(whole) => {
                    whole.bytes += travel.bytes;
                    whole.tensors += travel.tensors;
                }
                None => joined.travels.push(travel.clone()),
            }
        }
        joined
    }

    /// The bucket of each collective.
    fn buckets_of(&self, sizes: &Buckets) -> Vec<usize> {
        let mut bucket = vec![0; self.travels.len()];
        // Buckets so far, those since the last wait with their kinds, and what the open one has.
        let mut count = 0;
        let mut kinds: Vec<CollectiveKind> = Vec::new();
        let mut open: Option<Travel> = None;
        for event in &self.events {
            match *event {
                Event::Kernel(..) => {}
                Event::Wait(_, at) if self.travels[at].kind == CollectiveKind::AllGather => {}
                Event::Wait(..) => {
                    // Gathers start between the waits for gradients.
                    kinds.retain(|kind| *kind == CollectiveKind::AllGather);
                    open = open.filter(|open| open.kind == CollectiveKind::AllGather);
                }
                Event::Start(_, at) => {
                    let travel = &self.travels[at];
                    let own = kinds.iter().filter(|kind| **kind == travel.kind).count();
                    let limit = if own <= 1 { sizes.first } else { sizes.others };
                    match &mut open {
                        Some(whole)
                            if travel.kind != CollectiveKind::FromRoot
                                && (whole.kind, whole.dtype) == (travel.kind, travel.dtype)
                                && whole.bytes + travel.bytes <= limit =>
                        {
                            whole.bytes += travel.bytes;
                        }
                        _ => {
                            count += 1;
                            kinds.push(travel.kind);
                            open = Some(travel.clone());
                        }
                    }
                    bucket[at] = count - 1;
                }
            }
        }
        bucket
    }

    /// Plays the step. `seconds` is what a collective takes by itself. While a kernel runs and a collective
    /// travels both go at `speed`: 1 where they do not disturb each other, a half where they share one core.
    pub fn timeline(&self, seconds: impl Fn(&Travel) -> f64, speed: f64) -> Timeline {
        let mut timeline = Timeline {
            travels: vec![Times::default(); self.travels.len()],
            ..Timeline::default()
        };
        // Under way, in order, each with the seconds that are left.
        let mut under: VecDeque<(usize, f64)> = VecDeque::new();
        let mut now = 0.0;
        for event in &self.events {
            match *event {
                Event::Kernel(_, mut left) => {
                    timeline.kernels += left;
                    while left > 0.0 {
                        let Some((at, rest)) = under.front_mut() else {
                            now += left;
                            break;
                        };
                        let worked = left.min(*rest);
                        now += worked / speed;
                        left -= worked;
                        *rest -= worked;
                        if *rest <= 0.0 {
                            timeline.travels[*at].arrived = now;
                            under.pop_front();
                            begin(&under, &mut timeline, now);
                        }
                    }
                }
                Event::Start(_, at) => {
                    timeline.travels[at].started = now;
                    under.push_back((at, seconds(&self.travels[at])));
                    if under.len() == 1 {
                        begin(&under, &mut timeline, now);
                    }
                }
                Event::Wait(_, of) => {
                    let waited = now;
                    while under.iter().any(|&(at, _)| at == of) {
                        let Some((at, rest)) = under.pop_front() else {
                            break;
                        };
                        now += rest;
                        timeline.travels[at].arrived = now;
                        begin(&under, &mut timeline, now);
                    }
                    timeline.travels[of].exposed += now - waited;
                }
            }
        }
        timeline.step = now;
        timeline
    }
}

/// Notes that the first of what is under way goes on its way.
fn begin(under: &VecDeque<(usize, f64)>, timeline: &mut Timeline, now: f64) {
    if let Some(&(at, _)) = under.front() {
        timeline.travels[at].begun = now;
    }
}

/// What a kernel that calls other ranks sends.
fn travel(contract: &Contract, kernel: &KernelReport, call: &ExternCall) -> Travel {
    let collective = call.collective.and_then(|call| call.collective());
    let kind = collective.map(|collective| collective.kind);
    let (dtype, dims) = &call.inputs[0];
    let dtype: DType = dtype.parse().unwrap_or(DType::F32);
    // A bucket is a concatenation: its parts are the operands of the node in front.
    let operand = kernel.nodes[0].inputs.first();
    let mut nodes = contract.kernels.iter().flat_map(|kernel| &kernel.nodes);
    let whole = nodes.find(|node| Some(&node.node) == operand);
    Travel {
        kind: kind.unwrap_or(CollectiveKind::AllReduce),
        dtype,
        bytes: dtype.size() * dims.iter().product::<usize>(),
        tensors: whole
            .filter(|node| node.op == "concat")
            .map_or(1, |node| node.inputs.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn travel(bytes: usize) -> Travel {
        Travel {
            kind: CollectiveKind::AllReduce,
            dtype: DType::F32,
            bytes,
            tensors: 1,
        }
    }

    /// Three sums of 10, 20 and 30 bytes, started after 1, 2 and 3 seconds of kernels; one more second; a wait
    /// and half a second for each.
    fn step() -> Overlap {
        let mut events = Vec::new();
        for at in 0..3 {
            events.extend([Event::Kernel(2 * at, 1.0), Event::Start(2 * at + 1, at)]);
        }
        events.push(Event::Kernel(6, 1.0));
        for at in 0..3 {
            events.extend([Event::Wait(7 + 2 * at, at), Event::Kernel(8 + 2 * at, 0.5)]);
        }
        Overlap {
            events,
            travels: [10, 20, 30].map(travel).to_vec(),
        }
    }

    #[test]
    fn what_kernels_do_not_hide_is_exposed() {
        // A second for ten bytes: from 1 to 2, 2 to 4, 4 to 7; updates at 4 and 4.5, and at 7.
        let timeline = step().timeline(|travel| travel.bytes as f64 / 10.0, 1.0);
        let times = |at: usize| {
            let it = timeline.travels[at];
            (it.started, it.begun, it.arrived, it.exposed)
        };
        assert_eq!(times(0), (1.0, 1.0, 2.0, 0.0));
        assert_eq!(times(1), (2.0, 2.0, 4.0, 0.0));
        assert_eq!(times(2), (3.0, 4.0, 7.0, 2.0));
        assert_eq!(
            (timeline.step, timeline.kernels, timeline.exposed()),
            (7.5, 5.5, 2.0)
        );
    }

    #[test]
    fn gathers_are_joined_and_waited_for_two_later() {
        // Four gathers of 10 bytes, each behind an update, and each waited for behind the second after it.
        let travels = vec![
            Travel {
                kind: CollectiveKind::AllGather,
                ..travel(10)
            };
            4
        ];
        let update = |at: usize| [Event::Kernel(at, 1.0), Event::Start(4 + at, at)];
        let mut events: Vec<Event> = (0..4).flat_map(update).collect();
        events.insert(6, Event::Wait(8, 0));
        events.extend((1..4).map(|at| Event::Wait(8 + at, at)));
        let apart = Overlap { events, travels };
        assert_eq!(apart.joined(&Buckets::NONE).travels.len(), 4);
        let seconds = |travel: &Travel| travel.bytes as f64 / 10.0;
        // The last one is exposed.
        assert_eq!(apart.timeline(seconds, 1.0).step, 5.0);
        assert_eq!(apart.joined(&Buckets::NONE).timeline(seconds, 1.0).step, 5.0);
        let pairs = apart.joined(&Buckets {
            first: 20,
            others: 20,
        });
        let sizes: Vec<usize> = pairs.travels.iter().map(|it| it.bytes).collect();
        assert_eq!(sizes, [20, 20]);
        assert_eq!(pairs.timeline(seconds, 1.0).step, 6.0);
    }

    #[test]
    fn sharing_a_core_slows_both() {
        // Half speed: after the kernels of 4 s, of which 3 beside a sum, 3 s of the sums' 6 are done at 7 s.
        let timeline = step().timeline(|travel| travel.bytes as f64 / 10.0, 0.5);
        assert_eq!(timeline.travels[0].arrived, 3.0);
        assert_eq!(timeline.travels[1].arrived, 7.0);
        // Two updates of 0.5 s at half speed take 1 s of the last sum's 3.
        assert_eq!(timeline.travels[2].arrived, 7.0 + 2.0 + 2.0);
        assert_eq!(timeline.step, 11.5);
    }

    #[test]
    fn buckets_are_joined_as_the_pass_joins_them() {
        let sizes = |overlap: &Overlap| -> Vec<usize> { overlap.travels.iter().map(|it| it.bytes).collect() };
        let all = step().joined(&Buckets::with_others(25 * 60));
        assert_eq!(sizes(&all), [60]);
        assert_eq!(all.travels[0].tensors, 3);
        let timeline = all.timeline(|travel| travel.bytes as f64 / 10.0, 1.0);
        // Started at 3, waited for at 4, there at 9.
        assert_eq!((timeline.travels[0].exposed, timeline.step), (5.0, 10.5));
        let two = step().joined(&Buckets {
            first: 15,
            others: 100,
        });
        assert_eq!(sizes(&two), [10, 50]);
        let pass = step().joined(&Buckets { first: 30, others: 0 });
        assert_eq!(sizes(&pass), [30, 30]);
        assert_eq!(step().joined(&Buckets::NONE), step());
        assert_eq!(
            (step().kernel_seconds(), step().scaled(2.0).kernel_seconds()),
            (5.5, 11.0)
        );
    }
}
