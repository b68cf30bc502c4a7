//! Steps for operations with structure: indexing, products, convolutions, pooling, attention.

use super::build::{Builder, Fact, rounding};
use crate::op::{AttentionDims, ConvDims, Dims, DotDims, Op, ScatterMode, Window};
use crate::{DType, Shape, TensorType};

impl Builder<'_> {
    pub(super) fn index(&mut self) {
        let mut x = self.ranked(Self::number);
        let axis = self.axis(x);
        let mut ty = self.ty(x);
        if ty.shape[axis] == 0 {
            // An empty dimension has nothing to index.
            ty.shape[axis] = 3;
            x = self.parameter(ty.clone());
        }
        let (dtype, extent) = (self.index_dtype(), ty.shape[axis]);
        let mode = *self.choose(ScatterMode::ALL);
        match self.rng.below(4) {
            0 | 1 => {
                let smaller = ty
                    .shape
                    .iter()
                    .map(|&extent| self.between(extent.min(1), extent))
                    .collect::<Shape>();
                let shape = smaller.with(axis, self.extent());
                let indices = self.indices(
                    &TensorType {
                        dtype,
                        shape: shape.clone(),
                    },
                    extent,
                );
                if self.chance(2) {
                    self.moved(Op::Gather { axis }, &[x, indices]);
                } else {
                    let hits = shape[axis];
                    let updates = self.of_type(&TensorType {
                        dtype: ty.dtype,
                        shape,
                    });
                    self.scatter(Op::Scatter { axis, mode }, mode, x, indices, updates, hits);
                }
            }
            _ => {
                let count = self.extent();
                let indices = self.indices(&TensorType::new(dtype, [count]), extent);
                if self.chance(2) {
                    self.moved(Op::IndexSelect { axis }, &[x, indices]);
                } else {
                    let updates = self.of_type(&TensorType {
                        dtype: ty.dtype,
                        shape: ty.shape.with(axis, count),
                    });
                    self.scatter(Op::IndexPut { axis, mode }, mode, x, indices, updates, count);
                }
            }
        }
    }

    /// Adds a scatter in which at most `hits` updates land on one element.
    fn scatter(&mut self, op: Op, mode: ScatterMode, x: Fact, indices: Fact, updates: Fact, hits: usize) {
        let n = hits as f64;
        match mode {
            _ if !self.ty(x).dtype.is_float() => drop(self.exact(op, &[x, indices, updates])),
            ScatterMode::Add => {
                let bound = x.bound + n * updates.bound;
                let rounded = n * rounding(self.ty(x).dtype, bound);
                self.computed(
                    op,
                    &[x, indices, updates],
                    bound,
                    x.error + n * updates.error + rounded,
                );
            }
            ScatterMode::Mul => {
                let updates = self.within(updates, 1.0);
                let rounded = n * rounding(self.ty(x).dtype, x.bound);
                let error = x.error + n * updates.error * x.bound + rounded;
                self.computed(op, &[x, indices, updates], x.bound, error);
            }
            _ => drop(self.moved(op, &[x, indices, updates])),
        }
    }

    /// A number type, and operands of the two shapes.
    fn pair(&mut self, a: Shape, b: Shape) -> (Fact, Fact) {
        let dtype = if self.chance(5) {
            self.int_dtype()
        } else {
            self.float_dtype()
        };
        (
            self.of_type(&TensorType { dtype, shape: a }),
            self.of_type(&TensorType { dtype, shape: b }),
        )
    }

    /// Adds a node whose results are sums of at most `terms` products of elements of `a` and `b`. Half of
    /// the products of 16-bit operands have results of f32, which are not rounded to 16 bits.
    fn products(&mut self, op: Op, a: Fact, b: Fact, terms: usize) -> Fact {
        let operands = self.ty(a).dtype;
        if !operands.is_float() {
            return self.exact(op, &[a, b]);
        }
        let wide = operands != operands.compute() && self.chance(2);
        let result = wide.then(|| operands.compute());
        let (op, dtype) = (op.with_result(result).unwrap_or(op), result.unwrap_or(operands));
        let n = terms as f64;
        let bound = n * a.bound * b.bound;
        let error = n * (a.error * b.bound + b.error * a.bound) + n * rounding(dtype, bound);
        self.node(op, &[a, b], &[(bound, error + rounding(dtype, bound))])[0]
    }

    pub(super) fn dot(&mut self) {
        let operand = |fact: Fact, ty: &TensorType| {
            ty.dtype.is_float() && ty.shape.rank() >= 2 && ty.numel() > 0 && Self::usable(fact)
        };
        if self.config.together
            && let Some(a) = self.existing(operand)
        {
            return self.product_of(a);
        }
        let counts = [
            self.between(0, 2),
            self.between(0, 2),
            self.between(0, 2),
            self.between(0, 2),
        ];
        let [batch, contract, rows, columns] =
            counts.map(|count| (0..count).map(|_| self.extent().min(5)).collect::<Vec<usize>>());
        let (a_shape, a_batch, a_contract) = self.shuffled(&batch, &contract, &rows);
        let (b_shape, b_batch, b_contract) = self.shuffled(&batch, &contract, &columns);
        let size = |groups: [&Vec<usize>; 3]| groups.iter().flat_map(|g| g.iter()).product::<usize>();
        let limit = 4 * self.config.max_elements;
        let sizes = [size([&batch, &rows, &columns]), a_shape.numel(), b_shape.numel()];
        if sizes.iter().any(|&size| size > limit) {
            return;
        }
        let (a, b) = self.pair(a_shape, b_shape);
        let dims = DotDims {
            a_batch,
            b_batch,
            a_contract,
            b_contract,
            result: None,
        };
        self.products(Op::DotGeneral(dims), a, b, contract.iter().product());
    }

    /// Adds a product of `a`, each of whose dimensions is contracted, kept or, rarely, of a batch.
    fn product_of(&mut self, a: Fact) {
        let TensorType { dtype, shape } = self.ty(a);
        let (mut batch, mut contract) = (Dims::new(), Dims::new());
        let contracted = self.axis(a);
        for axis in 0..shape.rank() {
            if axis == contracted || self.chance(5) {
                contract.push(axis);
            } else if self.chance(4) {
                batch.push(axis);
            }
        }
        let of = |axes: &Dims| axes.iter().map(|&axis| shape[axis]).collect::<Vec<usize>>();
        let (batches, depth) = (of(&batch), of(&contract));
        let columns: Vec<usize> = (0..self.between(0, 2)).map(|_| self.extent().max(1)).collect();
        let (b_shape, b_batch, b_contract) = self.shuffled(&batches, &depth, &columns);
        let terms: usize = depth.iter().product();
        let size = shape.numel() / terms * columns.iter().product::<usize>();
        if size.max(b_shape.numel()) > 4 * self.config.max_elements {
            return;
        }
        let b = self.of_type(&TensorType {
            dtype,
            shape: b_shape,
        });
        let dims = DotDims {
            a_batch: batch,
            b_batch,
            a_contract: contract,
            b_contract,
            result: None,
        };
        self.products(Op::DotGeneral(dims), a, b, terms);
    }

    /// A shape of these extents in a random order, and where the first two groups went.
    fn shuffled(&mut self, batch: &[usize], contract: &[usize], free: &[usize]) -> (Shape, Dims, Dims) {
        let all = [batch, contract, free].concat();
        let mut order: Vec<usize> = (0..all.len()).collect();
        for to in 1..order.len() {
            let from = self.between(0, to);
            order.swap(to, from);
        }
        let place = |source: usize| order.iter().position(|&entry| entry == source).unwrap_or(source);
        let split = batch.len() + contract.len();
        let shape = order.iter().map(|&source| all[source]).collect();
        (
            shape,
            (0..batch.len()).map(place).collect(),
            (batch.len()..split).map(place).collect(),
        )
    }

    pub(super) fn conv(&mut self) {
        let spatial = self.between(1, 3);
        let groups = self.between(1, 2);
        let (n, out_channels, in_channels) = (
            self.between(1, 2),
            self.between(1, 2) * groups,
            self.between(1, 2),
        );
        let mut each = |low, high| (0..spatial).map(|_| self.between(low, high)).collect::<Dims>();
        let kernel = each(1, 3);
        let (stride, dilation) = (each(1, 2), each(1, 2));
        let (pad_low, pad_high) = (each(0, 1), each(0, 2));
        let room = if spatial == 3 { 1 } else { 4 };
        let input: Dims = (0..spatial)
            .map(|axis| (kernel[axis] - 1) * dilation[axis] + self.between(1, room))
            .collect();
        let conv = ConvDims {
            stride,
            pad_low,
            pad_high,
            dilation,
            groups,
            result: None,
        };
        let out: Dims = (0..spatial)
            .filter_map(|axis| conv.output_extent(axis, input[axis], kernel[axis]))
            .collect();
        let shape =
            |n: usize, c: usize, rest: &Dims| Shape::new([n, c].into_iter().chain(rest.iter().copied()));
        let x = shape(n, in_channels * groups, &input);
        let w = shape(out_channels, in_channels, &kernel);
        let y = shape(n, out_channels, &out);
        let kernel_size: usize = kernel.iter().product();
        match self.rng.below(3) {
            0 => {
                let (x, w) = self.pair(x, w);
                self.products(Op::Conv(conv), x, w, in_channels * kernel_size);
            }
            1 => {
                let (dy, w) = self.pair(y, w);
                self.products(
                    Op::ConvInputGrad { conv, input },
                    dy,
                    w,
                    out_channels * kernel_size,
                );
            }
            _ => {
                let terms = n * out.iter().product::<usize>();
                let (x, dy) = self.pair(x, y);
                self.products(Op::ConvWeightGrad { conv, kernel }, x, dy, terms);
            }
        }
    }

    fn window(&mut self, spatial: usize, dilated: bool) -> (Window, Dims) {
        let mut each = |low, high| (0..spatial).map(|_| self.between(low, high)).collect::<Dims>();
        let size = each(1, 3);
        let (stride, extra) = (each(1, 3), each(0, 4));
        let dilation = if dilated {
            each(1, 2)
        } else {
            Dims::from_elem(1, spatial)
        };
        // At most half the window is padding, so that every window has an element.
        let pad_low: Dims = (0..spatial).map(|axis| self.between(0, size[axis] / 2)).collect();
        let pad_high: Dims = (0..spatial).map(|axis| self.between(0, size[axis] / 2)).collect();
        let input = (0..spatial)
            .map(|axis| (size[axis] - 1) * dilation[axis] + 1 + extra[axis])
            .collect();
        let ceil_mode = self.chance(3);
        (
            Window {
                size,
                stride,
                pad_low,
                pad_high,
                dilation,
                ceil_mode,
            },
            input,
        )
    }

    pub(super) fn pool(&mut self) {
        let kind = self.rng.below(5);
        let spatial = self.between(1, 2);
        let (window, input) = self.window(spatial, kind < 3);
        let out: Dims = (0..spatial)
            .filter_map(|axis| window.output_extent(axis, input[axis]))
            .collect();
        let planes = [self.between(1, 2), self.between(1, 2)];
        let shape = |rest: &Dims| Shape::new(planes.into_iter().chain(rest.iter().copied()));
        let dtype = self.float_dtype();
        let terms = out.iter().product::<usize>() as f64;
        let count_include_pad = self.chance(2);
        match kind {
            0 => {
                let x = self.of_type(&TensorType {
                    dtype,
                    shape: shape(&input),
                });
                self.moved(Op::MaxPool(window), &[x]);
            }
            1 | 2 => {
                let index_dtype = self.index_dtype();
                let x = self.parameter(TensorType {
                    dtype,
                    shape: shape(&input),
                });
                let op = Op::MaxPoolWithIndices {
                    window,
                    dtype: index_dtype,
                };
                let results = self.node(op, &[x], &[(x.bound, 0.0), (0.0, 0.0)]);
                let dy = self.of_type(&TensorType {
                    dtype,
                    shape: shape(&out),
                });
                let (bound, error) = (terms * dy.bound, terms * dy.error);
                let rounded = terms * rounding(dtype, bound);
                self.computed(
                    Op::MaxPoolGrad { input },
                    &[dy, results[1]],
                    bound,
                    error + rounded,
                );
            }
            3 => {
                let x = self.of_type(&TensorType {
                    dtype,
                    shape: shape(&input),
                });
                let rounded = 9.0 * rounding(dtype, x.bound);
                self.computed(
                    Op::AvgPool {
                        window,
                        count_include_pad,
                    },
                    &[x],
                    x.bound,
                    x.error + rounded,
                );
            }
            _ => {
                let dy = self.of_type(&TensorType {
                    dtype,
                    shape: shape(&out),
                });
                // An input element is in at most as many windows as a window has elements.
                let (bound, error) = (
                    9.0 * dy.bound,
                    9.0 * dy.error + 9.0 * rounding(dtype, 9.0 * dy.bound),
                );
                self.computed(
                    Op::AvgPoolGrad {
                        window,
                        count_include_pad,
                        input,
                    },
                    &[dy],
                    bound,
                    error,
                );
            }
        }
    }

    pub(super) fn attention(&mut self) {
        let [mask, hidden, dropout] = [self.chance(2), self.chance(3), self.chance(3)];
        let dims = AttentionDims {
            causal: self.chance(2),
            mask,
            hidden,
            mask_last: mask && hidden && self.chance(2),
            dropout,
            drop_scores: dropout && self.chance(2),
            safe: self.chance(3),
        };
        let dtype = self.float_dtype();
        let (batch, key_heads, repeat) = (self.between(1, 2), self.between(1, 2), self.between(1, 2));
        let (length, width, value_width) = (self.between(1, 4), self.between(1, 3), self.between(1, 3));
        // Every query sees a key, also in causal order.
        let key_length = length + self.between(0, 2);
        let heads = key_heads * repeat;
        let of = |shape: [usize; 4]| TensorType::new(dtype, shape);
        let mut operands = Vec::new();
        for shape in [
            [batch, heads, length, width],
            [batch, key_heads, key_length, width],
            [batch, key_heads, key_length, value_width],
        ] {
            let x = self.of_type(&of(shape));
            operands.push(self.within(x, 2.0));
        }
        let [q, k, v] = [operands[0], operands[1], operands[2]];
        let compute = dtype.compute();
        // Numbers and the mask may be of either type.
        let number = if self.chance(2) { dtype } else { compute };
        operands.push(self.constant(0.5, number));
        if dims.mask {
            let full = [batch, heads, length, key_length];
            let shape = full.map(|extent| if self.chance(2) { 1 } else { extent });
            operands.push(self.parameter(TensorType::new(number, shape)));
        }
        if dims.hidden {
            let full = [batch, heads, length, key_length];
            let shape = full.map(|extent| if self.chance(2) { 1 } else { extent });
            operands.push(self.parameter(TensorType::new(DType::Bool, shape)));
            operands.push(self.constant(-2.0, number));
        }
        if dims.dropout {
            operands.push(self.word());
            operands.push(self.word());
            operands.push(self.constant(0.75, number));
            operands.push(self.constant(1.25, number));
        }
        // Scores are at most width * 2 * 2 / 2, raised by dropout, + 2, or fill + 2; each of their errors
        // moves a probability by at most as much.
        let d = width as f64;
        let factor = if dims.drop_scores { 0.5 * 1.25 } else { 0.5 };
        let score_bound = factor * d * q.bound * k.bound + 4.0;
        let score_error =
            factor * d * (q.error * k.bound + k.error * q.bound) + 3.0 * d * rounding(compute, score_bound);
        let n = key_length as f64;
        let out_bound = v.bound * if dims.dropout { 1.25 } else { 1.0 };
        let out_error = 2.0 * out_bound * (2.0 * score_error + n * rounding(compute, 1.0))
            + 2.0 * v.error
            + rounding(dtype, out_bound);
        let stats_bound = score_bound.max(n);
        let stats_error = (2.0 * n + 1.0) * score_error + n * rounding(compute, stats_bound);
        let stats = (stats_bound, stats_error);
        let results = self.node(Op::Attention(dims), &operands, &[(out_bound, out_error), stats]);
        if self.chance(2) {
            return;
        }
        let d_out = self.of_type(&of([batch, heads, length, value_width]));
        let d_out = self.within(d_out, 2.0);
        let inner = self.constant(-1.0, number);
        operands.extend([results[1], d_out, operands[3], inner]);
        if let Some(at) = dims.operands().dropout {
            operands.push(operands[at + 3]);
        }
        // Sums over rows or keys of p * (g . v - D), each factor bounded as above.
        let e = value_width as f64;
        let d_score = 2.0 * e * d_out.bound * out_bound;
        let d_score_error = 2.0 * e * (d_out.error * out_bound + d_out.bound * (out_error + v.error))
            + d_score * 2.0 * (score_error + stats.1)
            + rounding(compute, d_score);
        let terms = n.max((length * repeat) as f64);
        let result = |other: Fact| {
            let bound = 0.5 * terms * d_score * other.bound;
            let error = 0.5 * terms * (d_score_error * other.bound + d_score * other.error);
            (
                bound,
                error + terms * rounding(compute, bound) + rounding(dtype, bound),
            )
        };
        let dv_bound = terms * d_out.bound * 1.25;
        let dv_error = terms * (d_out.error * 1.25 + d_out.bound * 1.25 * 2.0 * (score_error + stats.1));
        let dv = (
            dv_bound,
            dv_error + terms * rounding(compute, dv_bound) + rounding(dtype, dv_bound),
        );
        self.node(Op::AttentionGrad(dims), &operands, &[result(k), result(q), dv]);
    }
}
