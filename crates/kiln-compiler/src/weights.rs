//! Weights of convolutions, with the channels of the image last.
//!
//! Kernels for images whose channels come last read a weight likewise, `[out, taps, in]`, and a parameter
//! lies `[out, in, taps]`. Each call would copy it first, forward and backward, and wait for that. Where a
//! target asks for it ([`Policy::weights_last`]) a step copies such a parameter once, at its start and with
//! the others ([`join_casts`](crate::schedule::together::join_casts)):
//!
//! ```text
//!   y = conv x, w                            c = cast w      (of the same type: a copy)
//!   g = conv_input_grad d, w         ──►     y = conv x, c
//!                                            g = conv_input_grad d, c
//! ```
//!
//! What is cast only for convolutions to read is stored so, too ([`is_read_alone`]): a copy in 16 bits is the
//! one that they read. The layout is [`layout`](crate::schedule::layout)'s to choose.

use rustc_hash::FxHashMap;

use kiln_graph::op::Op;
use kiln_graph::{Graph, Node, Rewriter, TypeError, Users, Value};

use crate::options::Options;
use crate::policy::Policy;

/// Channels of an image are a multiple of so many where kernels read a weight with its channels last: what an
/// access of sixteen bytes has of 16 bits. The weight of a picture is packed in another way.
const CHANNELS: usize = 8;

/// Makes the copies in `graph`; none if there is nothing to copy.
///
/// # Errors
/// Only if it makes an ill-typed node, which would be a bug.
pub fn run(graph: &Graph, options: &Options, policy: &Policy) -> Result<Option<Graph>, TypeError> {
    if !policy.weights_last || !options.transform || !options.fuse {
        return Ok(None);
    }
    let users = graph.users();
    let is_given = |value: Value| matches!(graph.def(value).op, Op::Parameter { .. });
    let is_copied = |node: Node| is_read_last(graph, &users, node) && is_given(graph.node(node).inputs[1]);
    if !graph.nodes().any(|(node, _)| is_copied(node)) {
        return Ok(None);
    }
    let mut rewriter = Rewriter::new(graph);
    let mut copies: FxHashMap<Value, Value> = FxHashMap::default();
    for (node, data) in graph.nodes() {
        if !is_copied(node) {
            rewriter.copy(node)?;
            continue;
        }
        let operands = rewriter.map_all(&data.inputs);
        let (image, weight) = (operands[0], operands[1]);
        let copy = match copies.get(&weight) {
            Some(&copy) => copy,
            None => {
                let cast = Op::Cast(graph.dtype(data.inputs[1]));
                let copy = rewriter.graph.add(cast, &[weight], &data.provenance)?;
                copies.insert(weight, copy);
                copy
            }
        };
        let result = rewriter
            .graph
            .add(data.op.clone(), &[image, copy], &data.provenance)?;
        rewriter.replace(data.outputs[0], result);
    }
    Ok(Some(rewriter.finish().without_dead_code()))
}

/// Whether `node` is a convolution, or the gradient of the input of one, that reads its weight with the
/// channels last: one of windows, without groups, of images that the step itself stores.
fn is_read_last(graph: &Graph, users: &Users, node: Node) -> bool {
    let data = graph.node(node);
    let (Op::Conv(conv) | Op::ConvInputGrad { conv, .. }) = &data.op else {
        return false;
    };
    let [image, weight] = data.inputs[..] else {
        return false;
    };
    let mut made = image;
    while graph.def(made).op.is_movement() {
        made = graph.def(made).inputs[0];
    }
    conv.groups == 1
        && !data.op.is_pixelwise(graph.shape(weight))
        && graph.dtype(weight).is_float()
        && graph.shape(weight)[1].is_multiple_of(CHANNELS)
        && graph.ty(weight).numel() > 0
        && !matches!(graph.def(made).op, Op::Parameter { .. })
        && users.outputs(data.outputs[0]) == 0
}

/// Whether `value` is a cast whose only use is to be the weight of such convolutions.
pub fn is_read_alone(graph: &Graph, users: &Users, policy: &Policy, value: Value) -> bool {
    let read = |&node: &Node| is_read_last(graph, users, node) && graph.node(node).inputs[0] != value;
    policy.weights_last
        && matches!(graph.def(value).op, Op::Cast(_))
        && users.outputs(value) == 0
        && !users.of(value).is_empty()
        && users.of(value).iter().all(read)
}

#[cfg(test)]
mod tests {
    use kiln_graph::{DType, HostTensor, interpret, verify};

    use super::*;
    use crate::testing::POLICY;

    const LAST: Policy = Policy {
        weights_last: true,
        ..POLICY
    };

    /// A network of two convolutions and gradients: `w` and `v` are read forward and backward, `u` by a
    /// convolution of an argument, `t` by one whose result is an output.
    const STEP: &str = "graph @step {
  %x = parameter 0 : f32[2,3,6,6]
  %u = parameter 1 : f32[8,3,3,3]
  %w = parameter 2 : f32[8,8,3,3]
  %v = parameter 3 : f32[8,8,1,1]
  %t = parameter 4 : f32[4,8,3,3]
  %a = conv %x, %u {stride=[1,1], pad_low=[1,1], pad_high=[1,1], dilation=[1,1], groups=1} : f32[2,8,6,6]
  %b = conv %a, %w {stride=[1,1], pad_low=[1,1], pad_high=[1,1], dilation=[1,1], groups=1} : f32[2,8,6,6]
  %c = conv %b, %v {stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=1} : f32[2,8,6,6]
  %g = conv_input_grad %c, %w {stride=[1,1], pad_low=[1,1], pad_high=[1,1], dilation=[1,1], groups=1, input=[6,6]} : f32[2,8,6,6]
  %h = tanh %g : f32[2,8,6,6]
  %y = conv %h, %t {stride=[1,1], pad_low=[1,1], pad_high=[1,1], dilation=[1,1], groups=1} : f32[2,4,6,6]
  return %y
}";

    fn parse(text: &str) -> Graph {
        Graph::parse(text).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn a_parameter_is_copied_once() {
        let graph = parse(STEP);
        let copied = run(&graph, &Options::default(), &LAST).unwrap().unwrap();
        verify::verify(&copied).unwrap();
        let casts: Vec<Value> = copied
            .nodes()
            .filter(|(_, data)| matches!(data.op, Op::Cast(_)))
            .map(|(_, data)| data.outputs[0])
            .collect();
        let [copy] = casts[..] else { panic!("{copied}") };
        let users = copied.users();
        assert_eq!(users.of(copy).len(), 2);
        assert!(is_read_alone(&copied, &users, &LAST, copy));
        assert!(!is_read_alone(&copied, &users, &POLICY, copy));

        let numbers = |count: usize| (0..count).map(|at| (at as f64 * 0.7).sin());
        let tensors: Vec<HostTensor> = graph
            .parameters()
            .iter()
            .map(|&value| {
                let ty = graph.ty(value);
                HostTensor::from_floats(DType::F32, ty.shape.clone(), numbers(ty.numel()))
            })
            .collect();
        let [own, other] = [&graph, &copied].map(|graph| interpret(graph, &tensors, &[]).unwrap());
        assert_eq!(own[0].bytes(), other[0].bytes());
    }

    #[test]
    fn what_is_read_otherwise_stays() {
        let none = |graph: &Graph, options: &Options, policy: &Policy| {
            assert!(run(graph, options, policy).unwrap().is_none());
        };
        let graph = parse(STEP);
        none(&graph, &Options::default(), &POLICY);
        let plain = Options {
            fuse: false,
            ..Options::default()
        };
        none(&graph, &plain, &LAST);
        // Four channels, and groups.
        let few = STEP.replace("8,6,6", "4,6,6").replace("[8,8,", "[4,4,");
        let few = few.replace("[8,3,3,3]", "[4,3,3,3]").replace("[4,8,", "[4,4,");
        none(&parse(&few), &Options::default(), &LAST);
    }
}
