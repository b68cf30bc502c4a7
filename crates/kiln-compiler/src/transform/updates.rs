//! Parts written one after the other.
//!
//! Loops over time, such as Burn's recurrent layers, write the result of each step into a part of one tensor.
//! In a graph every such update is a new tensor, a copy of all of it, and so is every update of the gradient:
//! a sequence of n steps copies n times its length.
//!
//! 1. A slice of an updated tensor is a slice of the update where it lies inside, and of the tensor before
//!    the update where it lies outside. That way gradients of the steps read the gradient of the whole, and
//!    nothing reads the updates between.
//! 2. Updates one of the other, of which nothing else reads any but the last, are one concatenation of what
//!    is to be seen of each in the end. Each part is written once.

use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use kiln_graph::op::{Dims, Op};
use kiln_graph::{Graph, NodeData, Provenance, Rewriter, TypeError, Users, Value};

/// Most operands of one concatenation. Where there are more, concatenations of that many are joined.
const MOST_OPERANDS: usize = 64;

/// Reads through updates, and joins chains of them.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn updates(graph: &Graph) -> Result<Graph, TypeError> {
    if !graph
        .nodes()
        .any(|(_, data)| matches!(data.op, Op::UpdateSlice { .. }))
    {
        return Ok(graph.clone());
    }
    let read = read_through(graph)?.without_dead_code();
    Ok(join_chains(&read)?.without_dead_code())
}

/// Slices of updated tensors as slices of what they are made of.
fn read_through(graph: &Graph) -> Result<Graph, TypeError> {
    let mut rewriter = Rewriter::new(graph);
    for (node, data) in graph.nodes() {
        let found = match &data.op {
            Op::Slice { starts, limits, .. } => source(graph, data.inputs[0], starts, limits),
            _ => None,
        };
        match (found, &data.op) {
            (Some((value, starts)), Op::Slice { steps, .. }) => {
                let of = rewriter.map(value);
                let slice = part(&mut rewriter, of, data, starts, steps.clone())?;
                rewriter.replace(data.outputs[0], slice);
            }
            _ => {
                rewriter.copy(node)?;
            }
        }
    }
    Ok(rewriter.finish())
}

/// Where the box from `starts` to `limits` of `value` comes from, and its first index there: the furthest
/// value that has all of it as it is. None if no update is on the way.
fn source(graph: &Graph, value: Value, starts: &Dims, limits: &Dims) -> Option<(Value, Dims)> {
    let (mut from, mut first, mut updates) = (value, starts.clone(), 0);
    let extents: Dims = starts
        .iter()
        .zip(limits)
        .map(|(start, limit)| limit - start)
        .collect();
    loop {
        let data = graph.def(from);
        let inside = |at: usize, begin: usize, extent: usize| {
            first[at] >= begin && first[at] + extents[at] <= begin + extent
        };
        let apart = |at: usize, begin: usize, extent: usize| {
            first[at] >= begin + extent || first[at] + extents[at] <= begin
        };
        match &data.op {
            Op::UpdateSlice { starts, steps } if steps.iter().all(|&step| step == 1) => {
                let update = graph.shape(data.inputs[1]);
                let axes = || {
                    starts
                        .iter()
                        .enumerate()
                        .map(|(at, &begin)| (at, begin, update[at]))
                };
                if update.numel() == 0 || axes().any(|(at, begin, extent)| apart(at, begin, extent)) {
                    from = data.inputs[0];
                } else if axes().all(|(at, begin, extent)| inside(at, begin, extent)) {
                    from = data.inputs[1];
                    first.iter_mut().zip(starts).for_each(|(at, begin)| *at -= begin);
                } else {
                    break;
                }
                updates += 1;
            }
            Op::Slice { starts, steps, .. } if steps.iter().all(|&step| step == 1) => {
                from = data.inputs[0];
                first.iter_mut().zip(starts).for_each(|(at, begin)| *at += begin);
            }
            _ => break,
        }
    }
    (updates > 0).then_some((from, first))
}

/// The slice of `of`, a value of the new graph, that begins at `starts` and has the type of `like`'s result;
/// `of` itself where that is all of it.
fn part(
    rewriter: &mut Rewriter<'_>,
    of: Value,
    like: &NodeData,
    starts: Dims,
    steps: Dims,
) -> Result<Value, TypeError> {
    let shape = rewriter.old().shape(like.outputs[0]);
    let (
        Op::Slice {
            starts: from, limits, ..
        },
        false,
    ) = (&like.op, rewriter.graph.shape(of) == shape)
    else {
        return Ok(of);
    };
    let limits = starts.iter().zip(from.iter().zip(limits));
    let limits = limits
        .map(|(start, (from, limit))| start + limit - from)
        .collect();
    let op = Op::Slice {
        starts,
        limits,
        steps,
    };
    rewriter.graph.add(op, &[of], &like.provenance)
}

/// A stretch of the axis that a chain of updates is cut along.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    begin: usize,
    end: usize,
    /// What is seen there.
    value: Value,
    /// The index in `value` of what is seen at `begin`.
    first: usize,
}

/// Updates, one of the other, as concatenations.
fn join_chains(graph: &Graph) -> Result<Graph, TypeError> {
    let users = graph.users();
    // Updates that only the next one reads need no value of their own.
    let mut inner: FxHashSet<Value> = FxHashSet::default();
    let mut rewriter = Rewriter::new(graph);
    // From the last update of a chain to its first.
    let mut chains: Vec<(Value, usize, Vec<Stretch>)> = Vec::new();
    for (_, data) in graph.nodes().rev() {
        if let &[value] = data.outputs.as_slice()
            && !inner.contains(&value)
            && let Some((axis, stretches)) = chain(graph, &users, value, &mut inner)
        {
            chains.push((value, axis, stretches));
        }
    }
    for (node, data) in graph.nodes() {
        let last = data.outputs.first();
        match chains.last() {
            Some((value, axis, stretches)) if last == Some(value) => {
                let joined = join(&mut rewriter, data, *axis, stretches)?;
                rewriter.replace(*value, joined);
                chains.pop();
            }
            _ if last.is_some_and(|value| inner.contains(value)) => {}
            _ => {
                rewriter.copy(node)?;
            }
        }
    }
    Ok(rewriter.finish())
}

/// The axis and what is seen along it in the end, in order, if `last` is the end of a chain of updates. The
/// values between go to `inner`.
fn chain(
    graph: &Graph,
    users: &Users,
    last: Value,
    inner: &mut FxHashSet<Value>,
) -> Option<(usize, Vec<Stretch>)> {
    let (axis, _) = cut(graph, last)?;
    let whole = graph.shape(last)[axis];
    // Stretches that no later update has written.
    let mut open = vec![(0, whole)];
    let mut seen: Vec<Stretch> = Vec::new();
    let (mut base, mut between) = (last, Vec::new());
    while let Some((own, (begin, end))) = cut(graph, base)
        && own == axis
        && (base == last || (users.count(base) == 1))
    {
        between.push(base);
        let data = graph.def(base);
        let written = |(from, to): (usize, usize)| {
            let (from, to) = (from.max(begin), to.min(end));
            (from < to).then_some(Stretch {
                begin: from,
                end: to,
                value: data.inputs[1],
                first: from - begin,
            })
        };
        seen.extend(open.iter().copied().filter_map(written));
        let left = |(from, to): (usize, usize)| [(from, to.min(begin)), (from.max(end), to)];
        open = open
            .into_iter()
            .flat_map(left)
            .filter(|(from, to)| from < to)
            .collect();
        base = data.inputs[0];
    }
    // One update alone may be made in place.
    if between.len() < 2 {
        return None;
    }
    inner.extend(&between[1..]);
    seen.extend(open.into_iter().map(|(begin, end)| Stretch {
        begin,
        end,
        value: base,
        first: begin,
    }));
    seen.sort_by_key(|stretch| stretch.begin);
    Some((axis, seen))
}

/// The axis along which an update leaves some of a tensor as it was, and the stretch of it that it writes;
/// none if there are several, and for what is no update of neighbours.
fn cut(graph: &Graph, value: Value) -> Option<(usize, (usize, usize))> {
    let data = graph.def(value);
    let Op::UpdateSlice { starts, steps } = &data.op else {
        return None;
    };
    let (whole, update) = (graph.shape(value), graph.shape(data.inputs[1]));
    let mut cut = (0..whole.rank()).filter(|&axis| update[axis] != whole[axis]);
    let axis = cut.next()?;
    let is_one = cut.next().is_none() && steps.iter().all(|&step| step == 1) && update.numel() > 0;
    is_one.then_some((axis, (starts[axis], starts[axis] + update[axis])))
}

/// The concatenation of `stretches`, in the place of the update `last`.
fn join(
    rewriter: &mut Rewriter<'_>,
    last: &NodeData,
    axis: usize,
    stretches: &[Stretch],
) -> Result<Value, TypeError> {
    let mut operands: Vec<Value> = Vec::new();
    for stretch in stretches {
        operands.push(seen(rewriter, last, axis, stretch)?);
    }
    concatenation(rewriter, axis, operands, &last.provenance)
}

/// `operands`, of which there is at least one, joined along `axis`.
pub(super) fn concatenation(
    rewriter: &mut Rewriter<'_>,
    axis: usize,
    mut operands: Vec<Value>,
    p: &Provenance,
) -> Result<Value, TypeError> {
    loop {
        let mut joined = Vec::new();
        for some in operands.chunks(MOST_OPERANDS) {
            joined.push(rewriter.graph.add(Op::Concat { axis }, some, p)?);
        }
        operands = joined;
        if let [whole] = operands[..] {
            return Ok(whole);
        }
    }
}

/// What is seen in a stretch.
fn seen(
    rewriter: &mut Rewriter<'_>,
    last: &NodeData,
    axis: usize,
    stretch: &Stretch,
) -> Result<Value, TypeError> {
    let (old, p) = (rewriter.old(), &last.provenance);
    let ty = old.ty(stretch.value);
    let extent = stretch.end - stretch.begin;
    if ty.shape[axis] == extent {
        return Ok(rewriter.map(stretch.value));
    }
    // A slice of zeros is fewer zeros.
    if let Some(scalar) = old.splatted(stretch.value) {
        let scalar = rewriter.map(scalar);
        return rewriter.graph.splat(scalar, &ty.shape.with(axis, extent), p);
    }
    let mut starts: Dims = SmallVec::from_elem(0, ty.shape.rank());
    let (mut limits, steps): (Dims, Dims) = (ty.shape.dims().into(), SmallVec::from_elem(1, ty.shape.rank()));
    (starts[axis], limits[axis]) = (stretch.first, stretch.first + extent);
    let op = Op::Slice {
        starts,
        limits,
        steps,
    };
    rewriter.graph.add(op, &[rewriter.map(stretch.value)], p)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_graph::testing::{random_arguments, seeds};
    use kiln_graph::{DType, Shape, TensorType, interpret};

    /// Choices of a seed.
    struct Choices(kiln_graph::testing::Rng);

    impl Choices {
        fn below(&mut self, limit: usize) -> usize {
            self.0.below(limit as u64) as usize
        }

        /// A stretch of an extent, and now and then an empty one.
        fn stretch(&mut self, extent: usize) -> (usize, usize) {
            let begin = self.below(extent);
            (begin, begin + self.below(extent - begin + 1))
        }
    }

    fn floats(shape: &[usize]) -> TensorType {
        TensorType::new(DType::F32, Shape::from(shape))
    }

    /// Updates of zeros or an argument, most along one axis, and slices of what is there between: some are
    /// written to a later tensor, some are results.
    fn random_updates(seed: u64) -> Graph {
        let mut choices = Choices(kiln_graph::testing::Rng::new(seed));
        let (mut graph, p) = (Graph::new("updates"), Provenance::default());
        let whole = [1 + choices.below(4), 1 + choices.below(6)];
        let argument = graph.parameter(floats(&whole));
        let zeros = graph.full(0.0, &floats(&whole), &p).unwrap();
        let mut tensors = vec![argument, zeros];
        let mut pieces: Vec<Value> = Vec::new();
        let often = choices.below(2);
        for _ in 0..2 + choices.below(12) {
            // The newest tensor most of the time, so that there are chains.
            let at = match choices.below(5) {
                0 => choices.below(tensors.len()),
                _ => tensors.len() - 1,
            };
            let of = tensors[at];
            let axis = if choices.below(10) == 0 { 1 - often } else { often };
            let (begin, end) = choices.stretch(whole[axis]);
            let (mut starts, mut limits) = ([0, 0], whole);
            (starts[axis], limits[axis]) = (begin, end);
            let step = 1 + usize::from(choices.below(12) == 0);
            let mut steps = [1, 1];
            steps[axis] = step;
            let (starts, limits, steps) = (starts.as_slice(), limits.as_slice(), steps.as_slice());
            if choices.below(4) == 0 {
                let (starts, limits, steps) = (starts.into(), limits.into(), steps.into());
                pieces.push(
                    graph
                        .add(
                            Op::Slice {
                                starts,
                                limits,
                                steps,
                            },
                            &[of],
                            &p,
                        )
                        .unwrap(),
                );
            } else {
                let extent = (end - begin).div_ceil(step);
                let mut shape = whole;
                shape[axis] = extent;
                let fits = |value: &&Value| graph.shape(**value).dims() == shape;
                let update = match pieces.iter().rev().find(fits) {
                    Some(&piece) if choices.below(2) == 0 => piece,
                    _ => graph.parameter(floats(&shape)),
                };
                let op = Op::UpdateSlice {
                    starts: starts.into(),
                    steps: steps.into(),
                };
                tensors.push(graph.add(op, &[of, update], &p).unwrap());
            }
        }
        for value in pieces.into_iter().chain(tensors.last().copied()) {
            graph.output(value, None);
        }
        graph
    }

    fn count(graph: &Graph, is: fn(&Op) -> bool) -> usize {
        graph.nodes().filter(|(_, data)| is(&data.op)).count()
    }

    fn is_update(op: &Op) -> bool {
        matches!(op, Op::UpdateSlice { .. })
    }

    #[test]
    fn any_updates_and_slices_keep_their_values() {
        let (mut before, mut after) = (0, 0);
        for seed in seeds(0..3000) {
            let graph = random_updates(seed);
            let (arguments, scalars) = random_arguments(&graph, seed);
            let rewritten = updates(&graph).expect("well typed");
            kiln_graph::verify::verify(&rewritten).expect("well formed");
            let [expected, actual] =
                [&graph, &rewritten].map(|graph| interpret(graph, &arguments, &scalars).unwrap());
            assert_eq!(actual, expected, "seed {seed}\n{graph}\n{rewritten}");
            before += count(&graph.without_dead_code(), is_update);
            after += count(&rewritten, is_update);
        }
        assert!(after * 4 < before * 3, "{after} of {before} updates are left");
    }

    /// A loop of `steps` over time: each reads its part of `x`, and writes twice that; and the gradient of
    /// it.
    fn recurrent(steps: usize) -> Graph {
        let (mut graph, p) = (Graph::new("recurrent"), Provenance::default());
        let whole = floats(&[2, steps, 3]);
        let (x, gradient) = (graph.parameter(whole.clone()), graph.parameter(whole.clone()));
        let zeros = graph.full(0.0, &whole, &p).unwrap();
        let none = graph.full(0.0, &floats(&[2, 1, 3]), &p).unwrap();
        let (mut y, mut dy, mut dx) = (zeros, gradient, zeros);
        let slice = |graph: &mut Graph, of, at: usize| {
            let op = Op::Slice {
                starts: [0, at, 0].as_slice().into(),
                limits: [2, at + 1, 3].as_slice().into(),
                steps: [1, 1, 1].as_slice().into(),
            };
            graph.add(op, &[of], &p).unwrap()
        };
        let write = |graph: &mut Graph, of, at: usize, update| {
            let op = Op::UpdateSlice {
                starts: [0, at, 0].as_slice().into(),
                steps: [1, 1, 1].as_slice().into(),
            };
            graph.add(op, &[of, update], &p).unwrap()
        };
        for at in 0..steps {
            let now = slice(&mut graph, x, at);
            let twice = graph.binary(kiln_graph::op::BinaryOp::Add, now, now, &p).unwrap();
            y = write(&mut graph, y, at, twice);
        }
        for at in (0..steps).rev() {
            let now = slice(&mut graph, dy, at);
            let twice = graph.binary(kiln_graph::op::BinaryOp::Add, now, now, &p).unwrap();
            dx = write(&mut graph, dx, at, twice);
            dy = write(&mut graph, dy, at, none);
        }
        graph.output(y, None);
        graph.output(dx, None);
        graph
    }

    #[test]
    fn a_loop_over_time_writes_each_step_once() {
        for steps in [2, MOST_OPERANDS, MOST_OPERANDS + 1, 3 * MOST_OPERANDS] {
            let graph = recurrent(steps);
            let rewritten = updates(&graph).expect("well typed");
            kiln_graph::verify::verify(&rewritten).expect("well formed");
            assert_eq!(count(&rewritten, is_update), 0, "{steps} steps\n{rewritten}");
            let joins = count(&rewritten, |op| matches!(op, Op::Concat { .. }));
            let groups = steps.div_ceil(MOST_OPERANDS);
            assert_eq!(joins, 2 * (groups + usize::from(groups > 1)), "{steps} steps");
            let (arguments, scalars) = random_arguments(&graph, 7);
            let [expected, actual] =
                [&graph, &rewritten].map(|graph| interpret(graph, &arguments, &scalars).unwrap());
            assert_eq!(actual, expected);
        }
    }

    #[test]
    fn one_update_stays_as_it_is() {
        let text = "graph @one {
  %x = parameter 0 : f32[4,3]
  %u = parameter 1 : f32[1,3]
  %y = update_slice %x, %u {starts=[2,0], steps=[1,1]} : f32[4,3]
  return %y (alias 0)
}";
        let graph = Graph::parse(text).unwrap();
        assert_eq!(updates(&graph).unwrap().to_string(), graph.to_string());
    }
}
