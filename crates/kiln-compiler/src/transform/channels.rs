//! Statistics of channels, as batch normalisation and its gradient take them, in as few passes over the
//! images as possible.
//!
//! Values that differ only by channel are computed once for each channel, not at each place:
//!
//! ```text
//! f(broadcast a, broadcast b)          -> broadcast f(a, b)
//! x / broadcast(sqrt a)                -> x * broadcast(1 / sqrt a)
//! ```
//!
//! The second rounds twice; a square root is never so small or large that its reciprocal overflows or loses
//! digits.
//!
//! Sums over everything but the channels are brought to a few forms, so that the many sums of a gradient
//! become sums of the same two or three products, over one pass:
//!
//! ```text
//! sum(x * broadcast a)                 -> sum(x) * a
//! sum(x - broadcast m)                 -> sum(x) - n * m
//! sum((x - broadcast m)^2)             -> max(q - 2 * t * p + n * t^2, 0)
//!                                         with t = m - s, p = sum(x - s), q = sum((x - s)^2)
//! ```
//!
//! A factor that is infinite or zero then multiplies the whole sum and not its elements: `sum(x) * inf` may
//! be infinite where an element `0 * inf` would have made the sum NaN. Likewise a sum of elements near the
//! end of the range of f32 overflows before a small factor makes it less. The second form is for an `x` whose
//! sum is needed in any case: it loses digits where `m` is much larger than the difference. The third is NaN
//! where an element is infinite.
//!
//! The last form needs the mean only after the pass that also sums it. `s` is the mean of `SAMPLES` elements
//! of the channel, spread over images and places. Cancellation loses `1 + (t / deviation)^2` times the
//! rounding of the sums: one element alone is a deviation or three away from the mean, and in images with
//! outliers many deviations. Samples are taken relative to one of them, so that a channel of equal elements
//! has a variance of zero.
//!
//! Where a convolution makes `x` and its template sums up what it stores ([`Policy::epilogue_sums`]), `s`
//! must be known before `x` is: the samples are then pixels or windows of the convolution's own image, and
//! `s` is the mean of their products by the weight. There `sum(x)` is `p + n * s`, too, which is one sum
//! less.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use kiln_graph::op::{BinaryOp, ConvDims, Dims, Op, ReduceOp, UnaryOp};
use kiln_graph::{DType, Graph, Node, NodeData, Provenance, Rewriter, Shape, TypeError, Value};

use crate::policy::Policy;
use crate::products;

/// Rewrites `graph`. `autocast` is the type that convolutions of f32 are going to read, if another.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn channels(graph: &Graph, policy: &Policy, autocast: Option<DType>) -> Result<Graph, TypeError> {
    let mut pass = Channels {
        rewriter: Rewriter::new(graph),
        policy,
        autocast,
        by_channel: FxHashMap::default(),
        depth: 0,
        sums: FxHashMap::default(),
        around: FxHashMap::default(),
    };
    for (id, node) in graph.nodes() {
        pass.node(id, node)?;
    }
    Ok(pass.rewriter.finish().without_dead_code())
}

struct Channels<'a> {
    rewriter: Rewriter<'a>,
    policy: &'a Policy,
    autocast: Option<DType>,
    /// The results of [`Channels::by_channel`], by value and axis.
    by_channel: FxHashMap<(Value, usize), Option<Value>>,
    /// Operations between the value that was asked for and the one that is looked at.
    depth: usize,
    /// Sums of products over all but axis 1, by their factors, of which there is at least one: its shape is
    /// the image's.
    sums: FxHashMap<SmallVec<[Value; 2]>, Value>,
    /// The results of [`Channels::around`].
    around: FxHashMap<Value, (Value, Value)>,
}

/// The factors of a product: those that differ from place to place, and those that a channel has.
#[derive(Default)]
struct Factors {
    places: SmallVec<[Value; 2]>,
    channels: Vec<Factor>,
}

/// Some of what a convolution multiplies for each channel of its result.
struct ProductSamples {
    image: Value,
    weight: Value,
    /// What is taken of the image: pixels, or windows.
    slice: Op,
    /// How many pixels or windows those are.
    count: usize,
}

/// A factor of a channel.
enum Factor {
    Times(Value),
    Over(Value),
    Constant(f64),
}

/// Most operations between an image and the lists of channels that it is made of. What has more is made of
/// something else, and thousands of them one behind the other are more than a stack holds.
const DEEPEST: usize = 64;

/// Elements of a channel whose mean its variance is computed around, if it has as many.
const SAMPLES: usize = 16;

/// The same where each is a product of a pixel by a weight: fewer of deep ones, but this many.
const SAMPLES_OF_PRODUCT: usize = 4;

/// Elements of all pixels that are sampled for products, if so many samples are left.
const SAMPLED_DEPTH: usize = 4096;

/// Most factors that a product is taken apart into.
const MAX_FACTORS: usize = 12;

impl Channels<'_> {
    fn node(&mut self, id: Node, node: &NodeData) -> Result<(), TypeError> {
        let inputs = self.rewriter.map_all(&node.inputs);
        if let [result] = node.outputs.as_slice()
            && let Some(value) = self.rule(*result, &node.op, &inputs, &node.provenance)?
        {
            self.rewriter.replace(*result, value);
            return Ok(());
        }
        self.rewriter.copy(id)?;
        Ok(())
    }

    fn rule(
        &mut self,
        result: Value,
        op: &Op,
        inputs: &[Value],
        p: &Provenance,
    ) -> Result<Option<Value>, TypeError> {
        let ty = self.rewriter.old().ty(result).clone();
        if ty.dtype != DType::F32 {
            return Ok(None);
        }
        match op {
            Op::Reduce {
                op: ReduceOp::Sum,
                axes,
            } => self.reduction(inputs[0], axes, p),
            _ if ty.shape.rank() < 3 || ty.shape[1] == 1 || ty.numel() == ty.shape[1] => Ok(None),
            Op::Binary(BinaryOp::Div) if self.is_root(inputs[1]) => {
                let Some(root) = self.by_channel(inputs[1], 1, p)? else {
                    return Ok(None);
                };
                let graph = &mut self.rewriter.graph;
                let over = graph.unary(UnaryOp::Recip, root, p)?;
                let over = spread(graph, over, &ty.shape, p)?;
                graph.binary(BinaryOp::Mul, inputs[0], over, p).map(Some)
            }
            Op::Unary(_) | Op::Binary(_) => {
                let mut own = SmallVec::<[Value; 3]>::new();
                for &input in inputs {
                    match self.by_channel(input, 1, p)? {
                        Some(value) => own.push(value),
                        None => return Ok(None),
                    }
                }
                let graph = &mut self.rewriter.graph;
                let value = graph.add(op.clone(), &own, p)?;
                spread(graph, value, &ty.shape, p).map(Some)
            }
            Op::Transpose(perm) => {
                let Some(value) = self.by_channel(inputs[0], perm[1], p)? else {
                    return Ok(None);
                };
                spread(&mut self.rewriter.graph, value, &ty.shape, p).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Whether a value is a square root, spread or reshaped.
    fn is_root(&self, value: Value) -> bool {
        let data = self.rewriter.graph.def(value);
        match data.op {
            Op::Unary(UnaryOp::Sqrt) => true,
            Op::Broadcast { .. } | Op::Reshape(_) => self.is_root(data.inputs[0]),
            _ => false,
        }
    }

    /// The values by index along `axis`, of a tensor whose elements depend on that index alone.
    fn by_channel(&mut self, value: Value, axis: usize, p: &Provenance) -> Result<Option<Value>, TypeError> {
        if let Some(&known) = self.by_channel.get(&(value, axis)) {
            return Ok(known);
        }
        if self.depth == DEEPEST {
            return Ok(None);
        }
        self.depth += 1;
        let found = self.find_by_channel(value, axis, p);
        self.depth -= 1;
        let found = found?;
        self.by_channel.insert((value, axis), found);
        Ok(found)
    }

    fn find_by_channel(
        &mut self,
        value: Value,
        axis: usize,
        p: &Provenance,
    ) -> Result<Option<Value>, TypeError> {
        let graph = &self.rewriter.graph;
        let shape = graph.shape(value).clone();
        let channels = shape[axis];
        let data = graph.def(value).clone();
        if graph.dtype(value) != DType::F32 {
            return Ok(None);
        }
        match &data.op {
            Op::Broadcast { dims, .. } => {
                let operand = graph.shape(data.inputs[0]).clone();
                let own = dims.iter().position(|&to| to == axis);
                let extent = own.map_or(1, |at| operand[at]);
                if operand.numel() != extent {
                    return Ok(None);
                }
                let graph = &mut self.rewriter.graph;
                let list = Shape::from(&[channels][..]);
                if extent == channels {
                    return graph.reshape(data.inputs[0], list, p).map(Some);
                }
                let one = graph.reshape(data.inputs[0], Shape::from(&[][..]), p)?;
                graph.splat(one, &list, p).map(Some)
            }
            Op::Transpose(perm) => self.by_channel(data.inputs[0], perm[axis], p),
            Op::Reshape(_) => match same_axis(&shape, axis, graph.shape(data.inputs[0])) {
                Some(axis) => self.by_channel(data.inputs[0], axis, p),
                None => Ok(None),
            },
            Op::Unary(_) | Op::Binary(_) => {
                let mut own = SmallVec::<[Value; 3]>::new();
                for &input in &data.inputs {
                    match self.by_channel(input, axis, p)? {
                        Some(value) => own.push(value),
                        None => return Ok(None),
                    }
                }
                self.rewriter.graph.add(data.op, &own, p).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// A sum over all axes but one that is axis 1 of an image, maybe seen through movements.
    fn reduction(&mut self, x: Value, axes: &Dims, p: &Provenance) -> Result<Option<Value>, TypeError> {
        let graph = &self.rewriter.graph;
        let rank = graph.shape(x).rank();
        if axes.len() + 1 != rank {
            return Ok(None);
        }
        let Some(mut axis) = (0..rank).find(|axis| !axes.contains(axis)) else {
            return Ok(None);
        };
        let mut image = x;
        loop {
            let data = graph.def(image);
            match &data.op {
                Op::Transpose(perm) => axis = perm[axis],
                Op::Reshape(_) => match same_axis(graph.shape(image), axis, graph.shape(data.inputs[0])) {
                    Some(own) => axis = own,
                    None => break,
                },
                _ => break,
            }
            image = data.inputs[0];
        }
        let shape = graph.shape(image);
        // Of no elements there are no samples.
        let few = shape.numel() == shape[1] || shape.numel() == 0;
        if shape.rank() < 3 || axis != 1 || shape[1] == 1 || few {
            return Ok(None);
        }
        let mut factors = Factors::default();
        self.factor(image, &mut factors, p)?;
        let sum = self.product_sum(&factors.places, image, p)?;
        self.scale(sum, &factors.channels, p).map(Some)
    }

    /// Takes a product apart.
    fn factor(&mut self, value: Value, factors: &mut Factors, p: &Provenance) -> Result<(), TypeError> {
        if factors.places.len() + factors.channels.len() >= MAX_FACTORS {
            factors.places.push(value);
            return Ok(());
        }
        if let Some(own) = self.by_channel(value, 1, p)? {
            factors.channels.push(Factor::Times(own));
            return Ok(());
        }
        let data = self.rewriter.graph.def(value).clone();
        match data.op {
            Op::Binary(BinaryOp::Mul) => {
                self.factor(data.inputs[0], factors, p)?;
                self.factor(data.inputs[1], factors, p)
            }
            Op::Binary(BinaryOp::Add) if data.inputs[0] == data.inputs[1] => {
                factors.channels.push(Factor::Constant(2.0));
                self.factor(data.inputs[0], factors, p)
            }
            Op::Binary(BinaryOp::Div) => match self.by_channel(data.inputs[1], 1, p)? {
                Some(own) => {
                    factors.channels.push(Factor::Over(own));
                    self.factor(data.inputs[0], factors, p)
                }
                None => {
                    factors.places.push(value);
                    Ok(())
                }
            },
            Op::Unary(UnaryOp::Neg) => {
                factors.channels.push(Factor::Constant(-1.0));
                self.factor(data.inputs[0], factors, p)
            }
            _ => {
                factors.places.push(value);
                Ok(())
            }
        }
    }

    fn scale(&mut self, sum: Value, factors: &[Factor], p: &Provenance) -> Result<Value, TypeError> {
        let ty = self.rewriter.graph.ty(sum).clone();
        let graph = &mut self.rewriter.graph;
        let mut value = sum;
        for factor in factors {
            value = match *factor {
                Factor::Times(own) => graph.binary(BinaryOp::Mul, value, own, p)?,
                Factor::Over(own) => graph.binary(BinaryOp::Div, value, own, p)?,
                Factor::Constant(x) => {
                    let constant = graph.full(x, &ty, p)?;
                    graph.binary(BinaryOp::Mul, value, constant, p)?
                }
            };
        }
        Ok(value)
    }

    /// The sum over all places of a product of values of the shape of `image`.
    fn product_sum(&mut self, factors: &[Value], image: Value, p: &Provenance) -> Result<Value, TypeError> {
        let shape = self.rewriter.graph.shape(image).clone();
        let count = (shape.numel() / shape[1]) as f64;
        let ty = kiln_graph::TensorType {
            dtype: DType::F32,
            shape: Shape::from(&[shape[1]][..]),
        };
        if factors.is_empty() {
            // No factor says which image this is: the count of another one is another number.
            return self.rewriter.graph.full(count, &ty, p);
        }
        let mut key: SmallVec<[Value; 2]> = factors.iter().copied().collect();
        key.sort_unstable();
        if let Some(&known) = self.sums.get(&key) {
            return Ok(known);
        }
        let sum = match *key.as_slice() {
            [x] => match self.difference(x, p)? {
                // Where `sum(x)` is not known, the program may have subtracted to keep it small.
                Some((x, mean)) if self.sums.contains_key([x].as_slice()) => {
                    let sum = self.product_sum(&[x], image, p)?;
                    let graph = &mut self.rewriter.graph;
                    let count = graph.full(count, &ty, p)?;
                    let means = graph.binary(BinaryOp::Mul, count, mean, p)?;
                    graph.binary(BinaryOp::Sub, sum, means, p)?
                }
                None if self.policy.epilogue_sums.is_some() && self.convolution(x).is_some() => {
                    self.sum_around(x, count, p)?
                }
                _ => self.plain_sum(x, p)?,
            },
            [x, y] if x == y => match self.difference(x, p)? {
                Some((x, mean)) => self.square_sum(x, mean, count, p)?,
                None => self.plain_product_sum(&key, p)?,
            },
            _ => self.plain_product_sum(&key, p)?,
        };
        self.sums.insert(key, sum);
        Ok(sum)
    }

    /// `sum(x)` by way of the sum that a variance needs in any case: one less to keep.
    fn sum_around(&mut self, x: Value, count: f64, p: &Provenance) -> Result<Value, TypeError> {
        let (near, sample) = self.around(x, p)?;
        let sum = self.plain_sum(near, p)?;
        let graph = &mut self.rewriter.graph;
        let ty = graph.ty(sum).clone();
        let count = graph.full(count, &ty, p)?;
        let samples = graph.binary(BinaryOp::Mul, count, sample, p)?;
        graph.binary(BinaryOp::Add, sum, samples, p)
    }

    /// `x - s`, and `s`, the mean of some elements of each channel.
    fn around(&mut self, x: Value, p: &Provenance) -> Result<(Value, Value), TypeError> {
        if let Some(&known) = self.around.get(&x) {
            return Ok(known);
        }
        let sample = self.near_mean(x, p)?;
        let graph = &mut self.rewriter.graph;
        let shape = graph.shape(x).clone();
        let samples = spread(graph, sample, &shape, p)?;
        let near = graph.binary(BinaryOp::Sub, x, samples, p)?;
        self.around.insert(x, (near, sample));
        Ok((near, sample))
    }

    /// The image and the value of each channel that `value` is the difference of.
    fn difference(&mut self, value: Value, p: &Provenance) -> Result<Option<(Value, Value)>, TypeError> {
        let data = self.rewriter.graph.def(value).clone();
        if data.op != Op::Binary(BinaryOp::Sub) {
            return Ok(None);
        }
        let own = self.by_channel(data.inputs[1], 1, p)?;
        Ok(own.map(|own| (data.inputs[0], own)))
    }

    /// `sum((x - mean)^2)`, whatever `mean` is.
    fn square_sum(&mut self, x: Value, mean: Value, count: f64, p: &Provenance) -> Result<Value, TypeError> {
        let (near, sample) = self.around(x, p)?;
        let graph = &mut self.rewriter.graph;
        let square = graph.binary(BinaryOp::Mul, near, near, p)?;
        let (first, second) = (self.plain_sum(near, p)?, self.plain_sum(square, p)?);
        let graph = &mut self.rewriter.graph;
        let ty = graph.ty(first).clone();
        let shift = graph.binary(BinaryOp::Sub, mean, sample, p)?;
        // q - t * (2 p - n t)
        let twice = graph.binary(BinaryOp::Add, first, first, p)?;
        let count = graph.full(count, &ty, p)?;
        let shifts = graph.binary(BinaryOp::Mul, count, shift, p)?;
        let inner = graph.binary(BinaryOp::Sub, twice, shifts, p)?;
        let correction = graph.binary(BinaryOp::Mul, shift, inner, p)?;
        let sum = graph.binary(BinaryOp::Sub, second, correction, p)?;
        let zero = graph.full(0.0, &ty, p)?;
        graph.binary(BinaryOp::Max, sum, zero, p)
    }

    /// The mean of some elements of each channel.
    fn near_mean(&mut self, x: Value, p: &Provenance) -> Result<Value, TypeError> {
        if let Some(samples) = self.summed_product(x) {
            return self.near_mean_of_product(&samples, p);
        }
        let shape = self.rewriter.graph.shape(x).clone();
        let list = Shape::from(&[shape[1]][..]);
        let counts = sample_counts(shape.dims(), SAMPLES);
        let ones: Vec<usize> = vec![1; shape.rank()];
        let graph = &mut self.rewriter.graph;
        let one = graph.add(sample_slice(shape.dims(), &ones), &[x], p)?;
        let one = graph.reshape(one, list, p)?;
        let count: usize = counts.iter().product();
        if count == 1 {
            return Ok(one);
        }
        let some = graph.add(sample_slice(shape.dims(), &counts), &[x], p)?;
        let some_shape = graph.shape(some).clone();
        let ones = spread(graph, one, &some_shape, p)?;
        let apart = graph.binary(BinaryOp::Sub, some, ones, p)?;
        let sum = self.plain_sum(apart, p)?;
        let graph = &mut self.rewriter.graph;
        let ty = graph.ty(sum).clone();
        let share = graph.full(1.0 / count as f64, &ty, p)?;
        let apart = graph.binary(BinaryOp::Mul, sum, share, p)?;
        graph.binary(BinaryOp::Add, one, apart, p)
    }

    /// The result of a convolution that `x` is, or is a cast of.
    fn convolution(&self, x: Value) -> Option<Value> {
        let data = self.rewriter.graph.def(x);
        match data.op {
            Op::Cast(_) => self.convolution(data.inputs[0]),
            Op::Conv(_) => Some(x),
            _ => None,
        }
    }

    /// Samples of what the convolution that makes `x` multiplies, if its template can sum up `x`.
    fn summed_product(&self, x: Value) -> Option<ProductSamples> {
        let graph = &self.rewriter.graph;
        let made = self.convolution(x)?;
        let data = graph.def(made);
        let dtype = match graph.dtype(made) {
            DType::F32 => self.autocast.unwrap_or(DType::F32),
            dtype => dtype,
        };
        if self.policy.epilogue_sums.is_none() || !self.policy.epilogue_types.contains(&dtype) {
            return None;
        }
        let [image, weight] = data.inputs[..] else {
            return None;
        };
        let (shape, taps) = (graph.shape(image), graph.shape(weight));
        let depth: usize = taps[1..].iter().product();
        let most = (SAMPLED_DEPTH / depth.max(1)).clamp(SAMPLES_OF_PRODUCT, SAMPLES);
        let (counts, slice) = if products::is_of_pixels(graph, data) {
            let counts = sample_counts(shape.dims(), most);
            let slice = sample_slice(shape.dims(), &counts);
            (counts, slice)
        } else {
            let unit = self.policy.epilogue_windows?;
            let Op::Conv(conv) = &data.op else { return None };
            if !products::is_of_windows(graph, data, unit) {
                return None;
            }
            // One window of some images.
            let counts = sample_counts(&[shape[0]], most);
            (
                counts.clone(),
                window_slice(shape.dims(), &taps[2..], conv, counts[0])?,
            )
        };
        Some(ProductSamples {
            image,
            weight,
            slice,
            count: counts.iter().product(),
        })
    }

    /// The mean of some elements of each channel of a convolution, from `samples` of what it multiplies.
    fn near_mean_of_product(&mut self, samples: &ProductSamples, p: &Provenance) -> Result<Value, TypeError> {
        let graph = &mut self.rewriter.graph;
        let some = graph.add(samples.slice.clone(), &[samples.image], p)?;
        let some = graph.cast(some, DType::F32, p)?;
        let weight = graph.cast(samples.weight, DType::F32, p)?;
        let rank = graph.shape(some).rank();
        let out = graph.shape(weight)[0];
        // Channels of the result, samples, channels of the image: those are neighbours in memory.
        let last: Vec<usize> = (0..rank).filter(|&axis| axis != 1).chain([1]).collect();
        let some = graph.transpose(some, &last, p)?;
        let is_single = graph.shape(weight)[2..].iter().all(|&taps| taps == 1);
        let (weight, dims): (Value, Dims) = match is_single {
            true => {
                let matrix = Shape::from(&[out, graph.shape(weight)[1]][..]);
                (graph.reshape(weight, matrix, p)?, [0, rank].into_iter().collect())
            }
            false => (
                graph.transpose(weight, &last, p)?,
                [0].into_iter().chain(2..=rank).collect(),
            ),
        };
        let all: Vec<usize> = std::iter::once(out)
            .chain(graph.shape(some).iter().copied())
            .collect();
        let all = Shape::from(&all[..]);
        let mut spread = |value: Value, dims: Dims| {
            let spread = Op::Broadcast {
                shape: all.clone(),
                dims,
            };
            graph.add(spread, &[value], p)
        };
        let some = spread(some, (1..=rank).collect())?;
        let weight = spread(weight, dims)?;
        let product = graph.binary(BinaryOp::Mul, weight, some, p)?;
        let sum = Op::Reduce {
            op: ReduceOp::Sum,
            axes: (1..=rank).collect(),
        };
        let sum = graph.add(sum, &[product], p)?;
        let ty = graph.ty(sum).clone();
        let share = graph.full(1.0 / samples.count as f64, &ty, p)?;
        graph.binary(BinaryOp::Mul, sum, share, p)
    }

    fn plain_product_sum(&mut self, factors: &[Value], p: &Provenance) -> Result<Value, TypeError> {
        let mut product = factors[0];
        for &factor in &factors[1..] {
            product = self.rewriter.graph.binary(BinaryOp::Mul, product, factor, p)?;
        }
        self.plain_sum(product, p)
    }

    fn plain_sum(&mut self, x: Value, p: &Provenance) -> Result<Value, TypeError> {
        let axes = (0..self.rewriter.graph.shape(x).rank())
            .filter(|&axis| axis != 1)
            .collect();
        let sum = Op::Reduce {
            op: ReduceOp::Sum,
            axes,
        };
        self.rewriter.graph.add(sum, &[x], p)
    }
}

/// How many samples of a channel to take along each axis, `most` in all.
fn sample_counts(shape: &[usize], most: usize) -> Vec<usize> {
    let mut counts = vec![1; shape.len()];
    loop {
        let taken: usize = counts.iter().product();
        // The axis with the most elements for each sample.
        let axes = (0..shape.len()).filter(|&axis| axis != 1 && 2 * counts[axis] <= shape[axis]);
        match axes.max_by_key(|&axis| shape[axis] / counts[axis]) {
            Some(axis) if 2 * taken <= most => counts[axis] *= 2,
            _ => return counts,
        }
    }
}

/// The slice of every channel with so many elements along each axis, each from the middle of its part.
fn sample_slice(shape: &[usize], counts: &[usize]) -> Op {
    let step = |axis: usize| if axis == 1 { 1 } else { shape[axis] / counts[axis] };
    let start = |axis: usize| if axis == 1 { 0 } else { step(axis) / 2 };
    let limit = |axis: usize| match axis {
        1 => shape[1],
        _ => start(axis) + (counts[axis] - 1) * step(axis) + 1,
    };
    Op::Slice {
        starts: (0..shape.len()).map(start).collect(),
        limits: (0..shape.len()).map(limit).collect(),
        steps: (0..shape.len()).map(step).collect(),
    }
}

/// The slice of every channel with the pixels under the taps of one window of each of `count` images: the one
/// in the middle, or the nearest that lies within the image; none if none does.
fn window_slice(shape: &[usize], taps: &[usize], conv: &ConvDims, count: usize) -> Option<Op> {
    let apart = shape[0] / count;
    let mut starts: Dims = [apart / 2, 0].into_iter().collect();
    let mut limits: Dims = [apart / 2 + (count - 1) * apart + 1, shape[1]]
        .into_iter()
        .collect();
    let mut steps: Dims = [apart, 1].into_iter().collect();
    for (axis, &taps) in taps.iter().enumerate() {
        let extent = shape[axis + 2];
        let reach = (taps - 1) * conv.dilation[axis];
        let last = extent.checked_sub(reach + 1)?;
        let middle = conv.output_extent(axis, extent, taps)? / 2 * conv.stride[axis];
        let start = middle.saturating_sub(conv.pad_low[axis]).min(last);
        starts.push(start);
        limits.push(start + reach + 1);
        steps.push(conv.dilation[axis]);
    }
    Some(Op::Slice {
        starts,
        limits,
        steps,
    })
}

/// A value for each channel, at every place of an image.
fn spread(graph: &mut Graph, value: Value, shape: &Shape, p: &Provenance) -> Result<Value, TypeError> {
    let spread = Op::Broadcast {
        shape: shape.clone(),
        dims: [1].into_iter().collect(),
    };
    graph.add(spread, &[value], p)
}

/// The axis of a reshape's operand that is `axis` of its result, if there is one.
fn same_axis(shape: &Shape, axis: usize, operand: &Shape) -> Option<usize> {
    let before: usize = shape[..axis].iter().product();
    (0..operand.rank())
        .find(|&own| operand[own] == shape[axis] && operand[..own].iter().product::<usize>() == before)
}

#[cfg(test)]
mod tests {
    use kiln_graph::{HostTensor, interpret, interpret_f64, verify};

    use super::*;
    use crate::testing::POLICY;

    /// The template has products of bf16.
    const SUMS: Policy = Policy {
        epilogue_sums: Some(1),
        epilogue_types: &[DType::BF16],
        ..POLICY
    };

    /// Thousands of operations on matrices, one behind the other, and an image that is one of them reshaped.
    #[test]
    fn a_long_chain_of_operations_takes_little_stack() {
        let (mut graph, p) = (Graph::new("chain"), Provenance::default());
        let ty = kiln_graph::TensorType::new(DType::F32, Shape::from(&[4, 3][..]));
        let mut x = graph.parameter(ty);
        for _ in 0..20_000 {
            x = graph.unary(UnaryOp::Sin, x, &p).unwrap();
        }
        let image = graph.reshape(x, Shape::from(&[1, 4, 3][..]), &p).unwrap();
        let image = graph.unary(UnaryOp::Sin, image, &p).unwrap();
        graph.output(image, None);
        let same = channels(&graph, &POLICY, None).unwrap();
        assert_eq!(same.num_nodes(), graph.num_nodes());
    }

    /// Mean and variance of each channel of a convolution.
    fn statistics(attributes: &str, plane: usize) -> Graph {
        statistics_of([1, 1], attributes, plane)
    }

    /// The same with windows of `taps`.
    fn statistics_of([down, right]: [usize; 2], attributes: &str, plane: usize) -> Graph {
        let text = format!(
            "graph @statistics {{
  %x = parameter 0 : f32[4,3,12,10]
  %w = parameter 1 : f32[5,3,{down},{right}]
  %y = conv %x, %w {{{attributes}, groups=1}} : f32[4,5,{p},10]
  %count = constant {n}.0 : f32[]
  %counts = broadcast %count {{dims=[]}} : f32[5]
  %sum = reduce sum %y {{axes=[0,2,3]}} : f32[5]
  %mean = div %sum, %counts : f32[5]
  %means = broadcast %mean {{dims=[1]}} : f32[4,5,{p},10]
  %d = sub %y, %means : f32[4,5,{p},10]
  %q = mul %d, %d : f32[4,5,{p},10]
  %squares = reduce sum %q {{axes=[0,2,3]}} : f32[5]
  %variance = div %squares, %counts : f32[5]
  return %mean, %variance
}}",
            p = plane,
            n = 40 * plane
        );
        Graph::parse(&text).unwrap_or_else(|error| panic!("{error}"))
    }

    const WHOLE: &str = "stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]";

    /// The operations whose results samples are taken of.
    fn sampled(graph: &Graph) -> Vec<&'static str> {
        let slices = graph
            .nodes()
            .filter(|(_, data)| matches!(data.op, Op::Slice { .. }));
        let mut made: Vec<_> = slices
            .map(|(_, data)| graph.def(data.inputs[0]).op.name())
            .collect();
        made.dedup();
        made
    }

    #[test]
    fn the_shift_of_a_product_that_is_summed_up_is_known_before_it() {
        let of = |policy: &Policy, attributes: &str, plane: usize, autocast: Option<DType>| {
            let graph = channels(&statistics(attributes, plane), policy, autocast).unwrap();
            verify(&graph).unwrap();
            sampled(&graph)
        };
        assert_eq!(of(&SUMS, WHOLE, 12, Some(DType::BF16)), ["parameter"]);
        // The template has no products of these types.
        assert_eq!(of(&SUMS, WHOLE, 12, None), ["conv"]);
        assert_eq!(of(&SUMS, WHOLE, 12, Some(DType::F16)), ["conv"]);
        assert_eq!(of(&POLICY, WHOLE, 12, Some(DType::BF16)), ["conv"]);
        let strided = "stride=[2,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]";
        assert_eq!(of(&SUMS, strided, 6, Some(DType::BF16)), ["conv"]);
        let padded = "stride=[1,1], pad_low=[1,0], pad_high=[1,0], dilation=[1,1]";
        assert_eq!(of(&SUMS, padded, 14, Some(DType::BF16)), ["conv"]);
        // Templates for windows take these, too.
        let windows = Policy {
            epilogue_windows: Some(3),
            ..SUMS
        };
        assert_eq!(of(&windows, strided, 6, Some(DType::BF16)), ["parameter"]);
        assert_eq!(of(&windows, padded, 14, Some(DType::BF16)), ["parameter"]);
        let others = Policy {
            epilogue_windows: Some(2),
            ..SUMS
        };
        assert_eq!(of(&others, strided, 6, Some(DType::BF16)), ["conv"]);
    }

    #[test]
    fn a_sampled_window_lies_within_its_image() {
        let slices = |graph: &Graph| -> Vec<Op> {
            let ops = graph.nodes().map(|(_, data)| data.op.clone());
            ops.filter(|op| matches!(op, Op::Slice { .. })).collect()
        };
        let windows = Policy {
            epilogue_windows: Some(1),
            ..SUMS
        };
        let made = |taps: [usize; 2], attributes: &str, plane: usize| {
            let graph = statistics_of(taps, attributes, plane);
            let graph = channels(&graph, &windows, Some(DType::BF16)).unwrap();
            verify(&graph).unwrap();
            graph
        };
        let of = |taps: [usize; 2], attributes: &str, plane: usize| slices(&made(taps, attributes, plane));
        let slice = |places: [[usize; 2]; 3]| {
            let [starts, limits, steps] = places;
            vec![Op::Slice {
                starts: [0, 0].into_iter().chain(starts).collect(),
                limits: [4, 3].into_iter().chain(limits).collect(),
                steps: [1, 1].into_iter().chain(steps).collect(),
            }]
        };
        let usual = "stride=[1,1], pad_low=[1,1], pad_high=[1,1], dilation=[1,1]";
        assert_eq!(of([3, 3], usual, 12), slice([[5, 4], [8, 7], [1, 1]]));
        let strided = "stride=[4,1], pad_low=[0,2], pad_high=[3,2], dilation=[2,2]";
        assert_eq!(of([2, 3], strided, 4), slice([[8, 3], [11, 8], [2, 2]]));
        // The window in the middle reaches beyond the image.
        let wide = "stride=[1,1], pad_low=[1,5], pad_high=[1,5], dilation=[1,5]";
        assert_eq!(sampled(&made([3, 3], wide, 12)), ["conv"]);
        let last = "stride=[1,1], pad_low=[0,4], pad_high=[9,4], dilation=[1,4]";
        assert_eq!(of([10, 3], last, 12), slice([[2, 1], [12, 10], [1, 4]]));
    }

    #[test]
    fn images_of_an_empty_batch_are_left_alone() {
        let text = statistics(WHOLE, 12).to_string();
        let empty = Graph::parse(&text.replace("f32[4,", "f32[0,")).unwrap_or_else(|error| panic!("{error}"));
        for autocast in [None, Some(DType::BF16)] {
            verify(&channels(&empty, &SUMS, autocast).unwrap()).unwrap();
        }
    }

    #[test]
    fn windows_are_sampled_as_they_are_multiplied() {
        let windows = Policy {
            epilogue_windows: Some(1),
            ..SUMS
        };
        for (taps, attributes, plane) in [
            (
                [3, 3],
                "stride=[1,1], pad_low=[1,1], pad_high=[1,1], dilation=[1,1]",
                12,
            ),
            (
                [2, 3],
                "stride=[4,1], pad_low=[0,2], pad_high=[3,2], dilation=[2,2]",
                4,
            ),
        ] {
            let graph = statistics_of(taps, attributes, plane);
            let sampled = channels(&graph, &windows, Some(DType::BF16)).unwrap();
            let numbers = |count: usize| (0..count).map(|at| (at as f64 * 0.37).sin() + 0.3);
            let tensors = [
                HostTensor::from_floats(DType::F32, [4, 3, 12, 10], numbers(4 * 3 * 120)),
                HostTensor::from_floats(
                    DType::F32,
                    [5, 3, taps[0], taps[1]],
                    numbers(15 * taps[0] * taps[1]),
                ),
            ];
            let [expected, actual] = [
                interpret_f64(&graph, &tensors, &[]),
                interpret(&sampled, &tensors, &[]),
            ];
            for (expected, actual) in expected.unwrap().iter().zip(&actual.unwrap()) {
                for (a, b) in expected.to_f64s().into_iter().zip(actual.to_f64s()) {
                    assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "{a} {b}");
                }
            }
        }
    }

    #[test]
    fn variances_around_it_have_no_more_error() {
        let graph = statistics(WHOLE, 12);
        let of_product = channels(&graph, &SUMS, Some(DType::BF16)).unwrap();
        let of_result = channels(&graph, &SUMS, None).unwrap();
        // Channels far from zero, one without any deviation, and one of zeros.
        let image = (0..4 * 3 * 120).map(|at| match at / 120 % 3 {
            0 => 1.0,
            _ => f64::from(at * 37 % 101).sin(),
        });
        let weight = [
            [300.0, 1.0, 0.0],
            [0.0, 0.5, -2.0],
            [7.7, 0.0, 0.0],
            [0.0, 0.0, 0.0],
            [-40.0, 0.1, 0.1],
        ];
        let tensors = [
            HostTensor::from_floats(DType::F32, [4, 3, 12, 10], image),
            HostTensor::from_floats(DType::F32, [5, 3, 1, 1], weight.into_iter().flatten()),
        ];
        let expected = interpret_f64(&graph, &tensors, &[]).unwrap();
        let distance = |graph: &Graph| -> Vec<f64> {
            let actual = interpret(graph, &tensors, &[]).unwrap();
            let [actual, expected] = [&actual[1], &expected[1]].map(HostTensor::to_f64s);
            actual
                .iter()
                .zip(expected)
                .map(|(a, b)| (a - b).abs() / (b + 1e-3))
                .collect()
        };
        let [of_product, of_result] = [of_product, of_result].map(|graph| distance(&graph));
        assert!(
            of_result.iter().chain(&of_product).all(|&error| error < 1e-3),
            "{of_product:?} {of_result:?}"
        );
    }
}
