//! Convolutions that cut a picture into patches, as products of matrices.
//!
//! Where the window steps by its own extents and nothing is padded, each element of a picture is in one
//! window: what vision transformers begin with. The windows are then the rows of a matrix, a row of which is
//! `channels` by window:
//!
//! ```text
//! %p = reshape (transpose (reshape %x : f32[64,3,14,16,14,16]) : f32[64,14,14,3,16,16]) : f32[12544,768]
//!
//! conv %x, %w               ─►   %p · (reshape %w : f32[384,768])ᵀ
//! conv_weight_grad %x, %dy  ─►   %dyᵀ · %p
//! ```
//!
//! A picture has so few channels that the kernels of convolutions, which multiply vectors of channels, are
//! mostly idle or copy it in any case. With 64 pictures of 224 by 224, windows of 16 by 16 and 384 channels
//! the convolution took 102 us and its gradient 87 (bf16, H100), where copies take 34 and products 49. Images
//! of more channels stay: their convolutions read them where they are.

use kiln_graph::op::{Dims, DotDims, Op};
use kiln_graph::{DType, Graph, NodeData, Provenance, Rewriter, TypeError, Value};

/// The most channels of a picture.
const CHANNELS: usize = 4;

/// Replaces convolutions of patches in `graph`, and gradients of their weights.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn patches(graph: &Graph) -> Result<Graph, TypeError> {
    let mut rewriter = Rewriter::new(graph);
    for (node, data) in graph.nodes() {
        let Some(patches) = Patches::of(graph, data) else {
            rewriter.copy(node)?;
            continue;
        };
        let [first, second] = [data.inputs[0], data.inputs[1]].map(|value| rewriter.map(value));
        let new = &mut rewriter.graph;
        let result = match data.op {
            Op::Conv(_) => patches.forward(new, first, second, &data.provenance)?,
            _ => patches.weight_gradient(new, first, second, &data.provenance)?,
        };
        rewriter.replace(data.outputs[0], result);
    }
    Ok(rewriter.finish())
}

/// The patches of pictures.
struct Patches {
    pictures: usize,
    channels: usize,
    /// Channels of the result.
    out: usize,
    /// Extents of a window, and how many there are along each dimension.
    window: Dims,
    places: Dims,
    /// See [`DotDims::result`].
    result: Option<DType>,
}

impl Patches {
    /// Those that the convolution `data`, or the gradient of its weight, is of; none if it is no such.
    fn of(graph: &Graph, data: &NodeData) -> Option<Self> {
        let (conv, window, out) = match &data.op {
            Op::Conv(conv) => {
                let weight = graph.shape(data.inputs[1]);
                (conv, Dims::from_slice(&weight[2..]), weight[0])
            }
            Op::ConvWeightGrad { conv, kernel } => (conv, kernel.clone(), graph.shape(data.inputs[1])[1]),
            _ => return None,
        };
        let x = graph.shape(data.inputs[0]);
        let is_one = |list: &[usize]| list.iter().all(|&number| number == 1);
        let is_zero = |list: &[usize]| list.iter().all(|&number| number == 0);
        let divides = || {
            x[2..]
                .iter()
                .zip(&window)
                .all(|(extent, window)| extent % window == 0)
        };
        let fits = conv.groups == 1
            && conv.stride == window
            && !data.op.is_pixelwise(graph.shape(data.inputs[1]))
            && is_zero(&conv.pad_low)
            && is_zero(&conv.pad_high)
            && is_one(&conv.dilation)
            && x[1] <= CHANNELS
            && graph.dtype(data.inputs[0]).is_float()
            && !x.contains(&0);
        (fits && divides()).then(|| Self {
            pictures: x[0],
            channels: x[1],
            out,
            places: x[2..]
                .iter()
                .zip(&window)
                .map(|(extent, window)| extent / window)
                .collect(),
            window,
            result: conv.result,
        })
    }

    /// Elements of a patch.
    fn depth(&self) -> usize {
        self.channels * self.window.iter().product::<usize>()
    }

    /// Patches of all pictures.
    fn rows(&self) -> usize {
        self.pictures * self.places.iter().product::<usize>()
    }

    /// The matrix of all patches of `x`.
    fn matrix(&self, graph: &mut Graph, x: Value, p: &Provenance) -> Result<Value, TypeError> {
        let count = self.window.len();
        let mut apart = Dims::from_slice(&[self.pictures, self.channels]);
        for (&places, &window) in self.places.iter().zip(&self.window) {
            apart.extend([places, window]);
        }
        let places = (0..count).map(|axis| 2 + 2 * axis);
        let window = (0..count).map(|axis| 3 + 2 * axis);
        let order: Dims = [0].into_iter().chain(places).chain([1]).chain(window).collect();
        let apart = graph.reshape(x, &apart[..], p)?;
        let turned = graph.transpose(apart, &order, p)?;
        graph.reshape(turned, [self.rows(), self.depth()], p)
    }

    /// The product of two matrices whose dimensions `contract` are summed over.
    fn product(
        &self,
        graph: &mut Graph,
        of: [Value; 2],
        contract: [usize; 2],
        p: &Provenance,
    ) -> Result<Value, TypeError> {
        let [a, b] = contract.map(|axis| Dims::from_slice(&[axis]));
        let dims = DotDims {
            a_contract: a,
            b_contract: b,
            result: self.result,
            ..DotDims::default()
        };
        graph.add(Op::DotGeneral(dims), &of, p)
    }

    fn forward(
        &self,
        graph: &mut Graph,
        x: Value,
        weight: Value,
        p: &Provenance,
    ) -> Result<Value, TypeError> {
        let patches = self.matrix(graph, x, p)?;
        let weight = graph.reshape(weight, [self.out, self.depth()], p)?;
        let product = self.product(graph, [patches, weight], [1, 1], p)?;
        let mut shape = Dims::from_slice(&[self.pictures]);
        shape.extend(self.places.iter().copied().chain([self.out]));
        let result = graph.reshape(product, &shape[..], p)?;
        let places = 1..=self.places.len();
        let order: Dims = [0, self.places.len() + 1].into_iter().chain(places).collect();
        graph.transpose(result, &order, p)
    }

    fn weight_gradient(
        &self,
        graph: &mut Graph,
        x: Value,
        dy: Value,
        p: &Provenance,
    ) -> Result<Value, TypeError> {
        let places = (0..self.places.len()).map(|axis| 2 + axis);
        let order: Dims = [0].into_iter().chain(places).chain([1]).collect();
        let turned = graph.transpose(dy, &order, p)?;
        let rows = graph.reshape(turned, [self.rows(), self.out], p)?;
        let patches = self.matrix(graph, x, p)?;
        let product = self.product(graph, [rows, patches], [0, 0], p)?;
        let mut shape = Dims::from_slice(&[self.out, self.channels]);
        shape.extend(self.window.iter().copied());
        graph.reshape(product, &shape[..], p)
    }
}

#[cfg(test)]
mod tests {
    use kiln_graph::{HostTensor, interpret_f64};

    use super::*;

    /// A convolution of `x` with windows of `window`, attributes `rest`, and the gradient of its weight.
    fn graph(x: &str, window: &str, y: &str, rest: &str) -> Graph {
        let channels = x.split(',').nth(1).expect("it has channels");
        let attributes = format!("{rest}, groups=1");
        Graph::parse(&format!(
            "graph @patches {{
  %x = parameter 0 : f32[{x}]
  %w = parameter 1 : f32[5,{channels},{window}]
  %dy = parameter 2 : f32[{y}]
  %y = conv %x, %w {{{attributes}}} : f32[{y}]
  %dw = conv_weight_grad %x, %dy {{{attributes}, kernel=[{window}]}} : f32[5,{channels},{window}]
  return %y, %dw
}}"
        ))
        .expect("well formed")
    }

    fn results(graph: &Graph) -> Vec<Vec<f64>> {
        let arguments = graph.parameters().iter().enumerate().map(|(number, &value)| {
            let ty = graph.ty(value);
            let values = (0..ty.numel()).map(|i| ((i * 37 + number * 11) % 29) as f64 / 8.0 - 1.75);
            HostTensor::from_floats(ty.dtype, ty.shape.clone(), values)
        });
        let arguments: Vec<_> = arguments.collect();
        let results = interpret_f64(graph, &arguments, &[]).expect("it runs");
        results.iter().map(HostTensor::to_f64s).collect()
    }

    fn has_convolutions(graph: &Graph) -> bool {
        graph
            .nodes()
            .any(|(_, data)| matches!(data.op, Op::Conv(_) | Op::ConvWeightGrad { .. }))
    }

    #[test]
    fn patches_are_rows_of_a_matrix() {
        let plain = "pad_low=[0,0], pad_high=[0,0], dilation=[1,1]";
        let of = |stride: &str| format!("stride={stride}, {plain}");
        let cases = [
            graph("2,3,6,8", "3,2", "2,5,2,4", &of("[3,2]")),
            graph("1,4,4,4", "4,4", "1,5,1,1", &of("[4,4]")),
            graph(
                "3,1,12",
                "4",
                "3,5,3",
                "stride=[4], pad_low=[0], pad_high=[0], dilation=[1]",
            ),
        ];
        for before in cases {
            let after = patches(&before).expect("well typed");
            kiln_graph::verify::verify(&after).expect("well formed");
            assert!(!has_convolutions(&after), "{after}");
            assert_eq!(results(&before), results(&after), "{before}");
        }
    }

    #[test]
    fn other_convolutions_stay() {
        let cases = [
            graph(
                "2,3,6,6",
                "3,3",
                "2,5,2,2",
                "stride=[2,2], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]",
            ),
            graph(
                "2,3,7,6",
                "3,3",
                "2,5,2,2",
                "stride=[3,3], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]",
            ),
            graph(
                "2,3,5,6",
                "3,3",
                "2,5,2,2",
                "stride=[3,3], pad_low=[1,0], pad_high=[0,0], dilation=[1,1]",
            ),
            graph(
                "2,3,6,6",
                "1,1",
                "2,5,6,6",
                "stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]",
            ),
            graph(
                "2,8,6,6",
                "3,3",
                "2,5,2,2",
                "stride=[3,3], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]",
            ),
        ];
        for before in cases {
            let after = patches(&before).expect("well typed");
            assert!(has_convolutions(&after), "{after}");
        }
    }
}
