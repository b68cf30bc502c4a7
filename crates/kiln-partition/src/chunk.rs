//! Chunks: the widest part of a step, run for some of its rows at a time.
//!
//! A language model's logits are wider than all else: rows of tokens times a vocabulary. The product that
//! makes them (with the vocabulary's matrix) and the operations that follow from them (softmax, the loss,
//! its gradient, the two products of the backward pass) treat each row by itself, or sum over rows. So they
//! can all run for one chunk of the rows, and then for the next in the same memory; results for rows are
//! joined, sums over rows are added up. Recomputation cannot save this memory: whatever is kept, all logits
//! exist at once. Chunks cost time: each chunk reads the other operand of each product again, and writes
//! the sums again.
//!
//! Nothing here knows what a loss is. [`Region::find`] takes the widest product and follows one dimension
//! of its rows through the graph by each operation's own rule ([`follow`]). It gives up where a wide value
//! meets an operation that needs all rows at once. [`Region::cut`] rebuilds the graph. Sums over rows are
//! taken in another order than before, so results are equal up to rounding, not bit for bit.

mod cut;
mod follow;

use cranelift_entity::{EntitySet, SecondaryMap};
use kiln_graph::op::{DotDims, Op};
use kiln_graph::{Graph, Node, NodeData, Users, Value};

use crate::Machine;
use crate::cost::bytes;
use crate::liveness::Liveness;
use crate::report::{Chunks, Origin};

use follow::{Axes, Result, follow, is_repeatable, operands_of};

/// The most chunks: with more, other values are the widest.
const MOST: usize = 8;

/// The fewest rows of a chunk: with fewer, the product waits for its other operand.
const ROWS: usize = 64;

/// The widest product is worth chunks if it takes at least this part of the step's memory.
const SHARE: u64 = 8;

/// A part of a graph that can be run in chunks of rows.
#[derive(Debug)]
pub(crate) struct Region {
    /// How many chunks.
    pub(crate) count: usize,
    /// The product whose whole result no longer exists at once.
    root: Value,
    /// The dimension of each value that is cut: of the root, of values that follow from it, and of repeated
    /// values. A value that the region computes and that has no entry here is a sum over rows.
    axis: SecondaryMap<Value, Option<usize>>,
    /// The nodes that run once for each chunk.
    nodes: EntitySet<Node>,
    /// The nodes among `nodes` that only repeat or move narrow values for the region to read. Their
    /// originals stay in the graph if other nodes read them.
    repeated: EntitySet<Node>,
}

impl Region {
    /// The region around the widest product of `graph`, if that product takes a large part of the memory
    /// and its rows can be told apart. A product that is computed twice is left alone, because the memory
    /// that its chunks would save is in use again the second time.
    pub(crate) fn find(graph: &Graph) -> Option<Self> {
        let products = graph
            .nodes()
            .filter(|(_, data)| matches!(data.op, Op::DotGeneral(_)));
        let size = |value: Value| bytes(graph, value);
        let results: Vec<Value> = products.map(|(_, data)| data.outputs[0]).collect();
        let most = results.iter().map(|&value| size(value)).max()?;
        let mut widest = results.into_iter().filter(|&value| size(value) == most);
        let (root, None) = (widest.next()?, widest.next()) else {
            return None;
        };
        let peak = Liveness.profile(graph).into_iter().max()?;
        if most < peak / SHARE {
            return None;
        }
        let data = graph.def(root);
        let Op::DotGeneral(dims) = &data.op else {
            return None;
        };
        let operand = graph.shape(data.inputs[0]);
        let free = DotDims::free(operand.rank(), &dims.a_batch, &dims.a_contract);
        let rows: usize = free.iter().map(|&axis| operand[axis]).product();
        let users = graph.users();
        (0..free.len()).find_map(|number| {
            let axis = dims.a_batch.len() + number;
            let fits = |count: &usize| graph.shape(root)[axis].is_multiple_of(*count) && rows / count >= ROWS;
            let count = std::iter::successors(Some(MOST), |count| Some(count / 2))
                .take_while(|&count| count > 1)
                .find(fits)?;
            Self::around(graph, &users, root, axis, count)
        })
    }

    /// The region around `root` with its dimension `axis` cut into `count`.
    fn around(graph: &Graph, users: &Users, root: Value, axis: usize, count: usize) -> Option<Self> {
        let mut region = Self {
            count,
            root,
            axis: SecondaryMap::new(),
            nodes: EntitySet::new(),
            repeated: EntitySet::new(),
        };
        region.axis[root] = Some(axis);
        let stuck = region.follow_rows(graph);
        region.choose(graph, users, &stuck)?;
        region.repeat_wide_operands(graph)?;
        let is_wide_output = |output: &kiln_graph::Output| {
            region.nodes.contains(graph.value(output.value).node) && region.is_wide(graph, output.value)
        };
        let leaves = graph.outputs.iter().any(is_wide_output);
        (!leaves && !region.waits_for_itself(graph)).then_some(region)
    }

    fn is_wide(&self, graph: &Graph, value: Value) -> bool {
        bytes(graph, value) * 2 >= bytes(graph, self.root)
    }

    fn axis_of(&self, value: Value) -> Option<usize> {
        self.axis[value]
    }

    /// Finds the dimension of every value whose rows follow from the root's rows; returns the nodes that
    /// cannot be followed.
    fn follow_rows(&mut self, graph: &Graph) -> EntitySet<Node> {
        let mut stuck = EntitySet::new();
        let root = graph.value(self.root).node;
        for (node, data) in graph.nodes().filter(|&(node, _)| node > root) {
            let known: Vec<Option<usize>> = data.inputs.iter().map(|&value| self.axis_of(value)).collect();
            if known.iter().all(Option::is_none) {
                continue;
            }
            match follow(graph, data, &known, self.count) {
                Some(Result::Rows(axis)) => self.axis[data.outputs[0]] = Some(axis),
                Some(Result::Sum) => {}
                None => {
                    stuck.insert(node);
                }
            }
        }
        stuck
    }

    /// Puts the nodes that make wide values, those that read them, and those between into the region. None
    /// if a node that cannot be followed (`stuck`) reads a wide value.
    fn choose(&mut self, graph: &Graph, users: &Users, stuck: &EntitySet<Node>) -> Option<()> {
        let root = graph.value(self.root).node;
        self.nodes.insert(root);
        for (node, data) in graph.nodes().rev().filter(|&(node, _)| node > root) {
            let followed = |value: &&Value| self.axis_of(**value).is_some();
            let reads = data.inputs.iter().filter(followed);
            let (mut some, mut wide) = (false, false);
            for &value in reads {
                some = true;
                wide |= self.is_wide(graph, value);
            }
            if !some {
                continue;
            }
            if stuck.contains(node) {
                if wide {
                    return None;
                }
                continue;
            }
            let rows = data.outputs.iter().filter(followed);
            let between = rows.copied().any(|value| {
                self.is_wide(graph, value) || users.of(value).iter().any(|&user| self.nodes.contains(user))
            });
            if wide || between {
                self.nodes.insert(node);
            }
        }
        Some(())
    }

    /// Wide operands that follow from narrow values (one-hot labels, repeated numbers) are computed again
    /// for each chunk. None if one of them would have to be cut along two dimensions.
    fn repeat_wide_operands(&mut self, graph: &Graph) -> Option<()> {
        let mut open: Vec<Node> = self.nodes.iter().collect();
        while let Some(node) = open.pop() {
            let data = graph.node(node);
            for (&value, axis) in data.inputs.iter().zip(self.operands(graph, data)?) {
                let Some(axis) = axis else { continue };
                let maker = graph.value(value).node;
                if self.nodes.contains(maker) {
                    if self.axis_of(value) != Some(axis) {
                        return None;
                    }
                    continue;
                }
                let wide = bytes(graph, value) * SHARE >= bytes(graph, self.root);
                if wide
                    && self.axis_of(value).is_none()
                    && is_repeatable(graph, graph.node(maker), axis, self.count)
                {
                    self.axis[value] = Some(axis);
                    self.nodes.insert(maker);
                    self.repeated.insert(maker);
                    open.push(maker);
                }
            }
        }
        Some(())
    }

    /// Which dimension of each operand of a node of the region is cut.
    fn operands(&self, graph: &Graph, data: &NodeData) -> Option<Axes> {
        let known: Axes = data.inputs.iter().map(|&value| self.axis_of(value)).collect();
        operands_of(graph, data, &known, self.axis_of(data.outputs[0]), self.count)
    }

    /// Whether a node outside lies between two nodes of the region, so that the region cannot run as a
    /// whole.
    fn waits_for_itself(&self, graph: &Graph) -> bool {
        let mut after: EntitySet<Node> = EntitySet::new();
        graph.nodes().any(|(node, data)| {
            let inside = self.nodes.contains(node);
            let makers = || data.inputs.iter().map(|&value| graph.value(value).node);
            if inside {
                // A sum is complete only after the last chunk.
                let is_sum = |&value: &Value| {
                    self.nodes.contains(graph.value(value).node) && self.axis_of(value).is_none()
                };
                return data.inputs.iter().any(is_sum) || makers().any(|maker| after.contains(maker));
            }
            let of_region = |maker: Node| self.nodes.contains(maker) && !self.repeated.contains(maker);
            if makers().any(|maker| of_region(maker) || after.contains(maker)) {
                after.insert(node);
            }
            false
        })
    }

    /// How much longer the chunks take than the whole, in picoseconds: each chunk reads operands again and
    /// adds to sums.
    pub(crate) fn cost(&self, graph: &Graph, machine: &Machine) -> u64 {
        let mut moved = 0;
        for node in self.nodes.iter() {
            let data = graph.node(node);
            if !matches!(data.op, Op::DotGeneral(_)) {
                continue;
            }
            let whole = data.inputs.iter().filter(|&&value| self.axis_of(value).is_none());
            moved += whole.map(|&value| bytes(graph, value)).sum::<u64>();
            if self.axis_of(data.outputs[0]).is_none() {
                moved += 2 * bytes(graph, data.outputs[0]);
            }
        }
        machine.moved(moved * (self.count as u64 - 1))
    }

    /// A description for people.
    pub(crate) fn report(&self, graph: &Graph) -> Chunks {
        Chunks {
            count: self.count,
            bytes: bytes(graph, self.root) / self.count as u64,
            origin: Origin::of(graph.def(self.root)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::arguments;
    use kiln_graph::{interpret_f64, verify};

    /// Cuts the graph of a product `%z: f32[4,64,32]` (of `%x` and `%w`) and `lines`, and compares results.
    /// Returns how many chunks there are; 0 if the graph is left alone.
    fn chunks(lines: &str, outputs: &str) -> usize {
        let text = format!(
            "graph @head {{
  %x = parameter 0 : f32[4,64,3]
  %w = parameter 1 : f32[3,32]
  %labels = parameter 2 : i64[4,64]
  %mask = parameter 3 : f32[256,32]
  %z = dot_general %x, %w {{a_contract=[2], b_contract=[0]}} : f32[4,64,32]
{lines}
  return {outputs}
}}"
        );
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let Some(region) = Region::find(&graph) else {
            return 0;
        };
        let cut = region.cut(&graph).unwrap().graph.without_dead_code();
        assert_eq!(verify(&cut), Ok(()), "{cut}");
        let parameters = cut.parameters();
        let wide = |&(value, _): &(Value, _)| {
            bytes(&cut, value) >= bytes(&graph, region.root) && !parameters.contains(&value)
        };
        assert_eq!(cut.values().find(wide).map(|(value, _)| value), None, "{cut}");
        let (tensors, scalars) = arguments(&graph, 3);
        let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
        let found = interpret_f64(&cut, &tensors, &scalars).unwrap();
        for (expected, found) in expected.iter().zip(&found) {
            for (expected, found) in expected.to_f64s().into_iter().zip(found.to_f64s()) {
                assert!(
                    (expected - found).abs() <= 1e-9 * expected.abs().max(1.0),
                    "{expected} {found}\n{cut}"
                );
            }
        }
        region.count
    }

    /// A softmax over the classes, the loss, and the gradient's way back through two products.
    const LOSS: &str = "
  %rows = reshape %z : f32[256,32]
  %most = reduce max %rows {axes=[1]} : f32[256]
  %m = broadcast %most {dims=[0]} : f32[256,32]
  %shifted = sub %rows, %m : f32[256,32]
  %e = exp %shifted : f32[256,32]
  %sum = reduce sum %e {axes=[1]} : f32[256]
  %s = broadcast %sum {dims=[0]} : f32[256,32]
  %p = div %e, %s : f32[256,32]
  %flat = reshape %labels : i64[256]
  %column = reshape %flat : i64[256,1]
  %picked = gather %shifted, %column {axis=1} : f32[256,1]
  %loss = reduce sum %picked {axes=[0,1]} : f32[]
  %wide = broadcast %flat {dims=[0]} : i64[256,32]
  %classes = iota {axis=1} : i64[256,32]
  %hot = compare eq %classes, %wide : bool[256,32]
  %one = constant 1.0 : f32[]
  %ones = broadcast %one {dims=[]} : f32[256,32]
  %less = sub %p, %ones : f32[256,32]
  %dz = select %hot, %less, %p : f32[256,32]
  %back = reshape %dz : f32[4,64,32]
  %dx = dot_general %back, %w {a_contract=[2], b_contract=[1]} : f32[4,64,3]
  %dw = dot_general %x, %back {a_contract=[0,1], b_contract=[0,1]} : f32[3,32]";

    #[test]
    fn a_loss_and_its_gradients_run_in_chunks() {
        assert_eq!(chunks(LOSS, "%loss, %dx, %dw"), 4);
        // The extent that is cut is 4, however many rows follow it.
        assert_eq!(chunks(LOSS, "%loss, %sum"), 4);
    }

    #[test]
    fn labels_whose_first_dimension_is_not_divided_are_read_whole() {
        // The rows of the product are cut into more parts than there are sequences.
        let text = "graph @soft {
  %x = parameter 0 : f32[256,3]
  %w = parameter 1 : f32[3,32]
  %labels = parameter 2 : f32[2,128,32]
  %z = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[256,32]
  %flat = reshape %labels : f32[256,32]
  %p = mul %z, %flat : f32[256,32]
  %loss = reduce sum %p {axes=[0,1]} : f32[]
  return %loss
}";
        let graph = Graph::parse(text).unwrap();
        let region = Region::find(&graph).unwrap();
        assert_eq!(region.count, 4);
        let cut = region.cut(&graph).unwrap().graph;
        let (tensors, scalars) = arguments(&graph, 3);
        let [expected, found] = [&graph, &cut].map(|graph| {
            let results = interpret_f64(graph, &tensors, &scalars).unwrap();
            results[0].to_f64s()[0]
        });
        assert!(
            (expected - found).abs() < 1e-9 * expected.abs(),
            "{expected} {found}"
        );
    }

    #[test]
    fn rows_are_followed_through_every_operation_that_has_them() {
        let then = |lines: &str| chunks(&format!("  %r = reshape %z : f32[256,32]\n{lines}"), "%out");
        assert_eq!(then("  %out = reduce sum %r {axes=[0]} : f32[32]"), 4);
        assert_eq!(
            then(
                "  %t = transpose %z {perm=[2,0,1]} : f32[32,4,64]\n  %out = reduce max %t {axes=[0]} : f32[4,64]"
            ),
            4
        );
        assert_eq!(then("  %out = arg_reduce max %r {axis=1} : i64[256]"), 4);
        assert_eq!(
            then("  %n = mul %r, %mask : f32[256,32]\n  %out = reduce sum %n {axes=[1]} : f32[256]"),
            4
        );
        assert_eq!(
            then(
                "  %flat = reshape %labels : i64[256,1]\n  %half = constant 0.5 : f32[]\n  %h = broadcast %half {dims=[]} : f32[256,1]\n  \
                 %y = scatter add %r, %flat, %h {axis=1} : f32[256,32]\n  %out = reduce sum %y {axes=[1]} : f32[256]"
            ),
            4
        );
        // A product with the rows as batch, and one of rows with rows.
        assert_eq!(
            then(
                "  %out = dot_general %r, %mask {a_batch=[0], b_batch=[0], a_contract=[1], b_contract=[1]} : f32[256]"
            ),
            4
        );
        assert_eq!(
            then("  %out = dot_general %mask, %r {a_contract=[0], b_contract=[0]} : f32[32,32]"),
            4
        );
    }

    #[test]
    fn what_needs_all_rows_is_left_alone() {
        let then = |lines: &str, outputs: &str| {
            chunks(&format!("  %r = reshape %z : f32[256,32]\n{lines}"), outputs)
        };
        assert_eq!(then("  %out = reduce max %r {axes=[0]} : f32[32]", "%out"), 0);
        assert_eq!(
            then("  %out = cumulative sum %r {axis=0} : f32[256,32]", "%out"),
            0
        );
        // Chunks save nothing where a wide value leaves the graph.
        assert_eq!(then("  %out = exp %r : f32[256,32]", "%out"), 0);
        // Rows beside other rows.
        assert_eq!(
            then(
                "  %out = dot_general %r, %r {a_contract=[1], b_contract=[1]} : f32[256,256]",
                "%out"
            ),
            0
        );
        // A normalisation over the rows: the second part waits for the whole first.
        let normal = "  %mean = reduce sum %r {axes=[0]} : f32[32]
  %wide = broadcast %mean {dims=[1]} : f32[256,32]
  %d = sub %r, %wide : f32[256,32]
  %out = reduce sum %d {axes=[1]} : f32[256]";
        assert_eq!(then(normal, "%out"), 0);
    }

    #[test]
    fn a_narrow_or_repeated_product_is_left_alone() {
        let twice = "  %again = dot_general %x, %w {a_contract=[2], b_contract=[0]} : f32[4,64,32]
  %a = reduce sum %z {axes=[2]} : f32[4,64]
  %b = reduce sum %again {axes=[2]} : f32[4,64]";
        assert_eq!(chunks(twice, "%a, %b"), 0);
        let beside = "  %c = constant 2.0 : f32[]
  %huge = broadcast %c {dims=[]} : f32[4096,128]
  %sorted, %order = sort %huge {axis=0} : f32[4096,128], i64[4096,128]
  %a = reduce sum %z {axes=[2]} : f32[4,64]";
        assert_eq!(chunks(beside, "%a, %sorted, %order"), 0);
    }
}
