//! Steps of several ranks.

use kiln_graph::alias::assign_aliases;
use kiln_graph::op::{Dims, Op};
use kiln_graph::{
    Collective, CollectiveKind, DType, Graph, HostTensor, Phase, Provenance, Rewriter, Scalar, TensorType,
    Value,
};

use super::{Sizes, Tape, arguments, decoder, decoder_step};
use crate::assign_phases;

/// A decoder with a few dozen gradients of a few hundred elements.
const SIZES: Sizes = Sizes {
    layers: 2,
    batch: 2,
    length: 8,
    width: 16,
    heads: 2,
    hidden: 48,
    vocabulary: 20,
    keep: 0.8,
};

/// A small decoder's step in which each gradient is a mean over `ranks` where the optimizer reads it. All
/// arguments end in it.
pub fn averaged_decoder(ranks: usize) -> Graph {
    averaged_gradients(&prepared(decoder_step(SIZES).graph), ranks)
}

/// A small decoder's step whose `ranks` ranks divide Adam's state. All arguments end in it.
pub fn sharded_decoder(ranks: usize) -> Graph {
    prepared(recorded_shares(SIZES, ranks))
}

/// `graph` with aliases and phases.
fn prepared(mut graph: Graph) -> Graph {
    let dies = vec![true; graph.parameters().len()];
    assign_aliases(&mut graph, &dies);
    assign_phases(&mut graph);
    graph
}

/// The arguments of each of `ranks` ranks: other tensors and the same scalars. A tensor of one `i64` is the
/// number of the rank.
pub fn arguments_of_ranks(graph: &Graph, ranks: usize) -> Vec<(Vec<HostTensor>, Vec<Scalar>)> {
    let number_of = TensorType::new(DType::I64, [1]);
    let of = |rank: usize| {
        let (mut tensors, scalars) = arguments(graph, 5 + rank as u64);
        for number in tensors.iter_mut().filter(|tensor| *tensor.ty() == number_of) {
            *number = HostTensor::from_ints(DType::I64, [1], [rank as i64]);
        }
        (tensors, scalars)
    };
    (0..ranks).map(of).collect()
}

/// `step`, whose nodes have phases, with the mean over `ranks` of each gradient where the optimizer reads it.
pub fn averaged_gradients(step: &Graph, ranks: usize) -> Graph {
    let mut new = Rewriter::new(step);
    let mut averaged = std::collections::HashSet::new();
    for (node, data) in step.nodes() {
        for &value in data
            .inputs
            .iter()
            .filter(|_| data.provenance.phase == Phase::Optimizer)
        {
            if step.def(value).provenance.phase != Phase::Backward || !averaged.insert(value) {
                continue;
            }
            let p = Provenance {
                phase: Phase::Backward,
                ..Provenance::operation("average")
            };
            let mean = Op::Collective(Collective::average(ranks));
            let mean = new.graph.add(mean, &[new.map(value)], &p).unwrap();
            new.replace(value, mean);
        }
        new.copy(node).unwrap();
    }
    assert!(!averaged.is_empty(), "the step has gradients");
    new.finish()
}

/// [`decoder_step`] whose `ranks` ranks divide Adam's state, recorded as a program does it: all gradients are
/// reduced and scattered, all shares updated, all parameters gathered. Zeros fill up what does not divide.
/// The one argument of one `i64` is the number of the rank.
fn recorded_shares(sizes: Sizes, ranks: usize) -> Graph {
    let mut tape = Tape::new("sharded decoder");
    let loss = decoder(&mut tape, sizes);
    let parameters = tape.parameters.clone();
    let gradients = tape.backward(loss, &parameters);
    let rate = tape.graph.scalar(DType::F32);
    let collective = |tape: &mut Tape, kind, mean, x| {
        let collective = Collective {
            mean,
            ..Collective::new(kind, ranks)
        };
        tape.add(Op::Collective(collective), &[x])
    };
    let mean = Op::Collective(Collective::average(ranks));
    let loss = tape.add(mean, &[loss]);
    let shares: Vec<Value> = gradients
        .into_iter()
        .map(|gradient| {
            let flat = filled(&mut tape, gradient, ranks);
            collective(&mut tape, CollectiveKind::ReduceScatter, true, flat)
        })
        .collect();
    let number = tape.input(TensorType::new(DType::I64, [1]));
    let mut updated = Vec::new();
    for (&weight, gradient) in parameters.iter().zip(shares) {
        let flat = filled(&mut tape, weight, ranks);
        let share = tape.shape(flat).numel() / ranks;
        let rows = tape.add(Op::Reshape([ranks, share].into()), &[flat]);
        let own = tape.add(Op::IndexSelect { axis: 0 }, &[rows, number]);
        let own = tape.add(Op::Reshape([share].into()), &[own]);
        let [(_, new), moments @ ..] = tape.adam_update(own, gradient, rate);
        updated.push(new);
        for (old, new) in moments {
            tape.state(old, new);
        }
    }
    for (weight, share) in parameters.into_iter().zip(updated) {
        let whole = collective(&mut tape, CollectiveKind::AllGather, false, share);
        let shape = tape.shape(weight);
        let slice = Op::Slice {
            starts: Dims::from_slice(&[0]),
            limits: Dims::from_slice(&[shape.numel()]),
            steps: Dims::from_slice(&[1]),
        };
        let cut = tape.add(slice, &[whole]);
        let shaped = tape.add(Op::Reshape(shape), &[cut]);
        tape.state(weight, shaped);
    }
    tape.graph.output(loss, None);
    tape.graph
}

/// The elements of `x` in one row, filled up with zeros so that `ranks` divide them.
fn filled(tape: &mut Tape, x: Value, ranks: usize) -> Value {
    let count = tape.shape(x).numel();
    let flat = tape.add(Op::Reshape([count].into()), &[x]);
    match count.next_multiple_of(ranks) - count {
        0 => flat,
        missing => {
            let p = Provenance::default();
            let zeros = tape.graph.full(0.0, &TensorType::new(DType::F32, [missing]), &p);
            tape.add(Op::Concat { axis: 0 }, &[flat, zeros.unwrap()])
        }
    }
}
