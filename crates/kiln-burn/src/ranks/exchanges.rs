//! What the ranks of a step exchange: how they find out that their steps belong together.
//!
//! Ranks need not compute the same. Each may have a batch of a shape of its own, and compile the step of a shape that
//! others know already. What must be equal is the sequence of their collectives, which gradient each one is of, and what
//! the step makes of the results: the update of the parameters. That follows from no batch, so a rank knows by itself
//! whether a step is new to all of them:
//!
//! - The first step with these exchanges is compared by all ranks before any compiles it (`meet`). Ranks whose batches
//!   have one shape must also compute the same. Rank 0 tells in which order sums are started, for all shapes that come.
//! - Every collective of every step takes along a [`StepTag`]: its exchanges, and what it computes on which shapes. A rank
//!   that went another way is noticed at the next collective, whatever the others know.
//! - A rank that compiles tells the others, who then wait for it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use kiln_compiler::{Contract, ExternCall, buckets};
use kiln_distributed::{Fact, StepTag, World, current};
use kiln_graph::{Collective, Graph, Node, Op, Value};
use rustc_hash::FxHashMap;

use super::shares;
use crate::execute::ExecuteError;

/// What the ranks of a graph exchange, before it is compiled.
pub(crate) struct Exchanges {
    world: World,
    /// What is equal on all ranks, in words.
    common: String,
    /// Whether the ranks have compared it just now, which they do at the same step.
    is_new: bool,
    /// The order in which sums are started ([`kiln_compiler::Options::sums`]).
    pub sums: Arc<[u32]>,
    tag: StepTag,
}

/// The order of the sums of the steps that the ranks have compared.
static KNOWN: Mutex<Option<HashMap<String, Arc<[u32]>>>> = Mutex::new(None);

/// Compares a step with those of the other ranks if its exchanges are new to all of them. `recorded` is the graph with
/// operations of the ranks, `graph` the same with collectives in their place.
///
/// # Errors
///
/// [`kiln_distributed::Error::Disagreement`] if the steps do not belong together; and if another rank is gone, or comes
/// with a step that all ranks have compared before.
pub(crate) fn meet(recorded: &Graph, graph: &Graph, options: &str) -> Result<Exchanges, ExecuteError> {
    let world =
        current().ok_or_else(|| ExecuteError::Ranks(kiln_distributed::Error::Broken("no world".into())))?;
    let mut facts = common(recorded, graph, options);
    let common: String = facts.iter().fold(String::new(), |mut text, fact| {
        let _ = writeln!(text, "{}", fact.value);
        text
    });
    let tag = StepTag {
        exchanges: 0,
        shapes: hash(&argument_types(graph).join(" ")),
        computes: hash(&computes(graph)),
    };
    let known = KNOWN
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .as_ref()
        .and_then(|known| known.get(&common).cloned());
    let is_new = known.is_none();
    let sums = match known {
        Some(sums) => sums,
        None => {
            facts.extend(own(graph));
            world.agree_on(&facts)?;
            let sums = order_of_first(&world, graph)?;
            let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            known.get_or_insert_default().insert(common.clone(), sums.clone());
            sums
        }
    };
    // Whether or not this rank compiles anything is known to it alone.
    world.be_late()?;
    Ok(Exchanges {
        world,
        common,
        is_new,
        sums,
        tag,
    })
}

impl Exchanges {
    /// Makes sure, where the exchanges were new, that all ranks have the same ones in the compiled step. Gives what goes
    /// along with each collective of the step.
    ///
    /// # Errors
    ///
    /// As [`meet`].
    pub(crate) fn compiled(self, contract: &Contract) -> Result<StepTag, ExecuteError> {
        let line = |call: &ExternCall| {
            let types: Vec<String> = call
                .inputs
                .iter()
                .map(|(dtype, dims)| format!("{dtype}{dims:?}"))
                .collect();
            format!("{} of {}", call.name, types.join(", "))
        };
        // Where a step waits for what it has started is its own affair.
        let started = contract
            .externs
            .iter()
            .filter(|call| call.collective.is_some_and(|part| part.collective().is_some()));
        let order = started.map(line).collect::<Vec<_>>().join("; ");
        if self.is_new {
            self.world
                .agree(&[("the order of its collectives", order.clone())])?;
        }
        Ok(StepTag {
            // Zero stands for no step.
            exchanges: hash(&format!("{}{order}", self.common)).max(1),
            ..self.tag
        })
    }
}

/// The order of sums of rank 0's graph.
fn order_of_first(world: &World, graph: &Graph) -> Result<Arc<[u32]>, ExecuteError> {
    let mut order: Vec<u8> = buckets::order(graph)
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    if !order.is_empty() {
        // All ranks have as many: they have compared their collectives.
        world.broadcast_patiently(0, &mut order)?;
    }
    let (numbers, _) = order.as_chunks::<4>();
    Ok(numbers.iter().map(|&number| u32::from_le_bytes(number)).collect())
}

/// The collectives of a graph, in order.
fn collectives(graph: &Graph) -> impl Iterator<Item = (Node, Collective, Value)> {
    graph.nodes().filter_map(|(node, data)| match data.op {
        Op::Collective(collective) => Some((node, collective, data.inputs[0])),
        _ => None,
    })
}

/// What all ranks must have in common, whatever the shapes of their batches.
fn common(recorded: &Graph, graph: &Graph, options: &str) -> Vec<Fact> {
    let mut facts = vec![Fact::of_all("Kiln's version", env!("CARGO_PKG_VERSION"))];
    let names = recorded.nodes().filter_map(|(_, data)| match &data.op {
        Op::Extern(op) => shares::collective(&data.op, 1).map(|_| op.name.as_str()),
        _ => None,
    });
    for (number, ((_, collective, operand), name)) in collectives(graph).zip(names).enumerate() {
        let mean = if collective.mean { " (mean)" } else { "" };
        let value = format!("{}{mean} of {}: {name}", collective.kind, graph.ty(operand));
        facts.push(Fact::of_all(format!("exchange {number} of its step"), value));
    }
    facts.push(Fact::of_all("the options of its step", options));
    facts.push(Fact::of_all("its update of the parameters", update(graph)));
    if averages_follow_averages(graph) {
        // A statistic is a mean of the ranks' means, which is that of all examples only if all have as many.
        for (number, ty) in argument_types(graph).into_iter().enumerate() {
            let name = format!(
                "argument {number} of its step (a mean over ranks inside of the step, such as synchronised batch norm, \
                 wants batches of one shape on all ranks)"
            );
            facts.push(Fact::of_all(name, ty));
        }
    }
    facts
}

/// What ranks with batches of one shape must have in common, and what tells other programs from this one.
fn own(graph: &Graph) -> Vec<Fact> {
    let shapes = argument_types(graph).join(" ");
    let nodes = format!(
        "{} operations, {} outputs",
        graph.num_nodes(),
        graph.outputs.len()
    );
    // Movements and reductions may follow from the shape. Zeros stand in for the tangents of outputs that
    // the loss of a rank does not use.
    let is_common = |op: &Op| !(op.is_movement() || matches!(op, Op::Reduce { .. } | Op::Constant { .. }));
    let mut kinds: Vec<&str> = graph
        .nodes()
        .filter(|(_, data)| is_common(&data.op))
        .map(|(_, data)| data.op.name())
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    vec![
        Fact::of_all("the number of its outputs", graph.outputs.len().to_string()),
        Fact::among(&shapes, "the size of its step", nodes),
        Fact::among(&shapes, "what its step computes", computes(graph)),
        Fact::of_all("the kinds of operations in its step", kinds.join(", ")),
    ]
}

/// The types of a graph's arguments.
fn argument_types(graph: &Graph) -> Vec<String> {
    let parameters = graph.parameters().iter();
    parameters.map(|&value| graph.ty(value).to_string()).collect()
}

/// What identifies the computation of a graph. Which outputs take over memory depends on what a program holds, and may
/// differ.
fn computes(graph: &Graph) -> String {
    let mut plain = graph.clone();
    plain.outputs.iter_mut().for_each(|output| output.alias = None);
    plain.fingerprint().to_string()
}

fn position(node: Node) -> usize {
    node.as_u32() as usize
}

/// For each node, whether it is or follows one of which `is` says so.
fn behind(graph: &Graph, is: impl Fn(&Op) -> bool) -> Vec<bool> {
    let mut behind = vec![false; graph.num_nodes()];
    for (node, data) in graph.nodes() {
        let mut operands = data.inputs.iter().map(|&it| position(graph.value(it).node));
        behind[position(node)] = is(&data.op) || operands.any(|operand| behind[operand]);
    }
    behind
}

/// For each node, whether one of the values is made from it.
fn before(graph: &Graph, values: impl Iterator<Item = Value>) -> Vec<bool> {
    let mut before = vec![false; graph.num_nodes()];
    values.for_each(|value| before[position(graph.value(value).node)] = true);
    for (node, data) in graph.nodes().rev() {
        if before[position(node)] {
            let operands = data.inputs.iter().map(|&it| position(graph.value(it).node));
            operands.for_each(|operand| before[operand] = true);
        }
    }
    before
}

/// Whether a mean over ranks is made from the result of another collective.
fn averages_follow_averages(graph: &Graph) -> bool {
    let behind = behind(graph, |op| matches!(op, Op::Collective(_)));
    collectives(graph)
        .any(|(_, collective, operand)| collective.mean && behind[position(graph.value(operand).node)])
}

/// What the step computes from the results of its collectives, as far as that is not made for a collective: the update of
/// the parameters. Equal on ranks that keep equal parameters.
fn update(graph: &Graph) -> String {
    let is_collective = |op: &Op| matches!(op, Op::Collective(_));
    let upstream = before(graph, collectives(graph).map(|(.., operand)| operand));
    let behind = behind(graph, is_collective);
    // Values by their number in the update.
    let mut numbers: FxHashMap<Value, usize> = FxHashMap::default();
    let mut text = String::new();
    let makers = graph.nodes().filter(|(node, _)| behind[position(*node)]);
    let results = makers.flat_map(|(_, data)| data.outputs.iter().copied());
    let part = before(graph, results);
    for (node, data) in graph.nodes().filter(|(node, _)| part[position(*node)]) {
        let own = behind[position(node)] || !upstream[position(node)];
        if own {
            let operands: Vec<String> = data
                .inputs
                .iter()
                .map(|&operand| match numbers.get(&operand) {
                    Some(number) => format!("%{number}"),
                    // Made for a collective, too: a parameter, as a rule.
                    None => graph.ty(operand).to_string(),
                })
                .collect();
            let op = match &data.op {
                Op::Parameter { .. } => "argument".to_owned(),
                Op::Scalar { .. } => "scalar".to_owned(),
                op => format!("{op:?}"),
            };
            // A collective's operand is each rank's own.
            let operands = if is_collective(&data.op) {
                Vec::new()
            } else {
                operands
            };
            let _ = write!(text, "{op} {}", operands.join(" "));
            for &output in &data.outputs {
                numbers.insert(output, numbers.len());
                let _ = write!(text, " {}", graph.ty(output));
            }
            text.push('\n');
        }
    }
    format!("{:016x}", hash(&text))
}

/// FNV-1a, of 64 bits: the same in every process (G. Fowler, L. C. Noll, K.-P. Vo).
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
