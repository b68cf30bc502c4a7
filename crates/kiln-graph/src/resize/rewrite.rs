//! The graph with sizes that were found.

use super::Pinned;
use super::relate::{Solver, bounds, moved};
use crate::op::{BinaryOp, Dims, ReduceOp};
use crate::{Graph, Node, NodeData, Op, Rewriter, Scalar, Shape, TensorType, Users, Value};

/// Writes the graph again, with the attributes that fit the sizes.
pub(super) fn rewrite(solver: &Solver<'_>) -> Result<Graph, Pinned> {
    let old = solver.graph;
    let users = old.users();
    let mut new = Rewriter::new(old);
    for (node, data) in old.nodes() {
        let op = operation(solver, &users, node, data)?;
        new.copy_as(node, op)
            .map_err(|error| Pinned::by(old, node, error.reason))?;
        for &output in &data.outputs {
            let wanted = Shape::new(solver.shape(output));
            let made = new.graph.shape(new.map(output));
            if *made != wanted {
                let reason = format!("its result is {made} where {wanted} is needed");
                return Err(Pinned::by(old, node, reason));
            }
        }
    }
    Ok(new.finish())
}

/// The operation of a node, with other attributes.
fn operation(solver: &Solver<'_>, users: &Users, node: Node, data: &NodeData) -> Result<Op, Pinned> {
    let result = || {
        Shape::new(
            data.outputs
                .first()
                .map_or(Vec::new(), |&output| solver.shape(output)),
        )
    };
    let spatial = || Dims::from_slice(&result()[2..]);
    Ok(match data.op.clone() {
        Op::Parameter { index, ty, copy_of } => Op::Parameter {
            index,
            ty: TensorType::new(ty.dtype, result()),
            copy_of,
        },
        Op::Iota { dtype, axis, .. } => Op::Iota {
            dtype,
            shape: result(),
            axis,
        },
        Op::Random { kind, dtype, .. } => Op::Random {
            kind,
            dtype,
            shape: result(),
        },
        Op::Reshape(_) => Op::Reshape(result()),
        Op::Broadcast { dims, .. } => Op::Broadcast {
            shape: result(),
            dims,
        },
        Op::Slice {
            starts,
            limits,
            steps,
        } => slice(solver, data, starts, limits, steps),
        Op::Pad { low, mut high } => {
            for axis in 0..high.len() {
                let inside = solver.now(data.inputs[0], axis) as i64 + low[axis];
                high[axis] = result()[axis] as i64 - inside;
            }
            Op::Pad { low, high }
        }
        Op::UpdateSlice { mut starts, steps } => {
            for axis in 0..starts.len() {
                starts[axis] = moved(solver.extents(data.inputs[0], axis), starts[axis]);
            }
            Op::UpdateSlice { starts, steps }
        }
        Op::TopK { axis, dtype, .. } => Op::TopK {
            axis,
            k: result()[axis],
            dtype,
        },
        Op::ConvInputGrad { conv, .. } => Op::ConvInputGrad {
            conv,
            input: spatial(),
        },
        Op::MaxPoolGrad { .. } => Op::MaxPoolGrad { input: spatial() },
        Op::AvgPool {
            mut window,
            count_include_pad,
        } => {
            global(solver, data.inputs[0], &mut window);
            Op::AvgPool {
                window,
                count_include_pad,
            }
        }
        Op::AvgPoolGrad {
            mut window,
            count_include_pad,
            ..
        } => {
            global(solver, data.outputs[0], &mut window);
            Op::AvgPoolGrad {
                window,
                count_include_pad,
                input: spatial(),
            }
        }
        Op::Constant { value, dtype } => Op::Constant {
            value: count(solver, users, data.outputs[0], value),
            dtype,
        },
        Op::Extern(op) => {
            let mut values = data.inputs.iter().chain(&data.outputs);
            if values.any(|&value| solver.has_changed(value)) {
                let reason = "an operation of the program's own says its shapes itself";
                return Err(Pinned::by(solver.graph, node, reason));
            }
            Op::Extern(op)
        }
        other => other,
    })
}

/// A slice: its bounds follow the operand, or its result if that is needed in another size.
fn slice(solver: &Solver<'_>, data: &NodeData, mut starts: Dims, mut limits: Dims, steps: Dims) -> Op {
    for axis in 0..starts.len() {
        let extents = solver.extents(data.inputs[0], axis);
        let wanted = solver.now(data.outputs[0], axis);
        (starts[axis], limits[axis]) = bounds(extents, (starts[axis], limits[axis]));
        let step = steps[axis].max(1);
        if (limits[axis] - starts[axis]).div_ceil(step) != wanted {
            limits[axis] = match wanted {
                0 => starts[axis],
                wanted => starts[axis] + (wanted - 1) * step + 1,
            };
        }
    }
    Op::Slice {
        starts,
        limits,
        steps,
    }
}

/// Pooling of whole images stays that.
fn global(solver: &Solver<'_>, image: Value, window: &mut crate::op::Window) {
    for axis in 0..window.size.len() {
        let (before, now) = solver.extents(image, axis + 2);
        if window.size[axis] == before {
            if window.stride[axis] == before {
                window.stride[axis] = now;
            }
            window.size[axis] = now;
        }
    }
}

/// A constant that is the number of elements of a mean, or one less, of another size.
fn count(solver: &Solver<'_>, users: &Users, constant: Value, value: Scalar) -> Scalar {
    let graph = solver.graph;
    let whole = value.to_f64();
    let readers = users.of(constant).iter().flat_map(|&node| {
        let data = graph.node(node);
        match data.op {
            Op::Broadcast { .. } => {
                let of_result = users.of(data.outputs[0]).iter();
                of_result.map(|&node| (node, data.outputs[0])).collect()
            }
            _ => vec![(node, constant)],
        }
    });
    for (node, divisor) in readers {
        let data = graph.node(node);
        if !matches!(data.op, Op::Binary(BinaryOp::Div)) || data.inputs[1] != divisor {
            continue;
        }
        let Some((before, now)) = summands(solver, data.inputs[0]) else {
            continue;
        };
        for less in [0, 1] {
            if before >= less && whole == (before - less) as f64 {
                let now = now.saturating_sub(less);
                return match value {
                    Scalar::Float(_) => Scalar::Float(now as f64),
                    Scalar::Int(_) => Scalar::Int(now as i64),
                    Scalar::UInt(_) => Scalar::UInt(now as u64),
                    Scalar::Bool(_) => value,
                };
            }
        }
    }
    value
}

/// How many elements a sum adds up, before and now.
fn summands(solver: &Solver<'_>, mut sum: Value) -> Option<(usize, usize)> {
    let graph = solver.graph;
    loop {
        let data = graph.def(sum);
        match &data.op {
            Op::Reshape(_) | Op::Cast(_) => sum = data.inputs[0],
            Op::Reduce {
                op: ReduceOp::Sum,
                axes,
            } => {
                let extents = axes.iter().map(|&axis| solver.extents(data.inputs[0], axis));
                return Some(extents.fold((1, 1), |(a, b), (before, now)| (a * before, b * now)));
            }
            _ => return None,
        }
    }
}
