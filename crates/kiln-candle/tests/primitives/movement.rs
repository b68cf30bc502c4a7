//! Reductions, movement, indexing and sorting, over element types, odd shapes and empty tensors.

use crate::common::{INTS, Relative, check, check_by, check_sum, random, random_indices, scalar, ty, wild};
use kiln_graph::op::{ArgReduceOp, Dims, Op, RandomKind, ReduceOp, ScatterMode};
use kiln_graph::{DType, HostTensor, Shape};

const NUMBERS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];

fn dims<const N: usize>(list: [usize; N]) -> Dims {
    Dims::from_slice(&list)
}

fn numbers() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|&dtype| dtype != DType::Bool)
}

#[test]
fn reductions() {
    let shapes: [&[usize]; 4] = [&[2, 3, 5], &[1, 7, 1], &[4, 1, 3], &[3, 9, 2]];
    for dtype in numbers() {
        for op in NUMBERS {
            for shape in shapes {
                for axes in [
                    dims([0]),
                    dims([1]),
                    dims([2]),
                    dims([0, 2]),
                    dims([0, 1]),
                    dims([0, 1, 2]),
                ] {
                    for x in [random(dtype, shape, 1), wild(dtype, shape, 2)] {
                        let op = Op::Reduce {
                            op,
                            axes: axes.clone(),
                        };
                        check_by(op, &[x], Relative::Tensor, 1.0);
                    }
                }
            }
        }
    }
    for op in [ReduceOp::Any, ReduceOp::All] {
        for shape in shapes {
            check(
                Op::Reduce { op, axes: dims([1]) },
                &[random(DType::Bool, shape, 5)],
            );
        }
    }
}

#[test]
fn reductions_of_nothing_are_neutral() {
    for dtype in numbers() {
        for op in NUMBERS {
            check(Op::Reduce { op, axes: dims([1]) }, &[random(dtype, [2, 0, 3], 0)]);
            check(Op::Reduce { op, axes: dims([0]) }, &[random(dtype, [2, 0], 0)]);
        }
    }
    for op in [ReduceOp::Any, ReduceOp::All] {
        check(
            Op::Reduce { op, axes: dims([0]) },
            &[random(DType::Bool, [0, 3], 0)],
        );
    }
}

#[test]
fn positions_of_extremes() {
    for dtype in numbers() {
        for op in [ArgReduceOp::Max, ArgReduceOp::Min] {
            for axis in 0..3 {
                for (x, index) in [
                    (random(dtype, [4, 5, 6], 1), DType::I64),
                    (wild(dtype, [4, 5, 6], 2), DType::U8),
                ] {
                    check(
                        Op::ArgReduce {
                            op,
                            axis,
                            dtype: index,
                        },
                        &[x],
                    );
                }
            }
        }
    }
}

#[test]
fn running_reductions() {
    for dtype in numbers() {
        for op in NUMBERS {
            for (axis, shape) in [(0, [7, 3]), (1, [3, 8]), (1, [2, 1])] {
                check_by(
                    Op::Cumulative { op, axis },
                    &[random(dtype, shape, 1)],
                    Relative::Tensor,
                    1.0,
                );
                check_by(
                    Op::Cumulative { op, axis },
                    &[wild(dtype, shape, 2)],
                    Relative::Tensor,
                    1.0,
                );
            }
        }
    }
    check(
        Op::Cumulative {
            op: ReduceOp::Sum,
            axis: 1,
        },
        &[random(DType::F32, [3, 0], 1)],
    );
}

#[test]
fn counting_and_shapes() {
    for dtype in DType::ALL {
        if dtype != DType::Bool {
            for (shape, axis) in [
                (Shape::from([3, 300]), 1),
                (Shape::from([5, 2, 3]), 0),
                (Shape::from([0, 2]), 1),
            ] {
                check(Op::Iota { dtype, shape, axis }, &[]);
            }
        }
        let x = wild(dtype, [2, 3, 4], 1);
        check(Op::Reshape(Shape::from([6, 1, 4])), std::slice::from_ref(&x));
        check(Op::Transpose(dims([2, 0, 1])), std::slice::from_ref(&x));
        check(Op::Flip(dims([0, 2])), std::slice::from_ref(&x));
        check(Op::Flip(dims([])), &[x]);
        let broadcast = |shape: &[usize], to: Dims| Op::Broadcast {
            shape: shape.into(),
            dims: to,
        };
        check(broadcast(&[2, 3, 4], dims([])), &[wild(dtype, [], 1)]);
        check(broadcast(&[2, 3, 4], dims([0, 2])), &[wild(dtype, [1, 4], 1)]);
        check(broadcast(&[2, 3, 4, 5], dims([1, 2])), &[wild(dtype, [3, 1], 1)]);
        check(broadcast(&[2, 0, 3], dims([2])), &[wild(dtype, [3], 1)]);
    }
}

#[test]
fn slices_and_padding() {
    for dtype in DType::ALL {
        let x = wild(dtype, [5, 7], 1);
        for (starts, limits, steps) in [
            (dims([0, 0]), dims([5, 7]), dims([1, 1])),
            (dims([1, 2]), dims([4, 7]), dims([1, 2])),
            (dims([4, 6]), dims([5, 7]), dims([3, 9])),
            (dims([0, 1]), dims([5, 6]), dims([2, 3])),
            (dims([2, 2]), dims([2, 4]), dims([1, 1])),
        ] {
            check(
                Op::Slice {
                    starts,
                    limits,
                    steps,
                },
                std::slice::from_ref(&x),
            );
        }
        let value = wild(dtype, [], 7);
        for (low, high) in [
            ([1, 0], [0, 2]),
            ([-1, 3], [2, -4]),
            ([-2, -3], [-3, -3]),
            ([0, -9], [1, 4]),
            ([-5, 2], [1, 0]),
        ] {
            let op = Op::Pad {
                low: low.into_iter().collect(),
                high: high.into_iter().collect(),
            };
            check(op, &[x.clone(), value.clone()]);
        }
        let op = Op::Pad {
            low: [2, 1].into_iter().collect(),
            high: [0, 1].into_iter().collect(),
        };
        check(op, &[wild(dtype, [0, 3], 1), value]);
        for axis in 0..2 {
            let parts: Vec<HostTensor> = [2, 0, 1, 3]
                .map(|extent| wild(dtype, Shape::from([3, 3]).with(axis, extent), extent as u64))
                .into();
            check(Op::Concat { axis }, &parts);
            check(Op::Concat { axis }, &parts[..1]);
        }
        for (update, starts, steps) in [
            ([2, 3], [1, 0], [1, 2]),
            ([5, 7], [0, 0], [1, 1]),
            ([1, 2], [4, 1], [8, 5]),
            ([0, 2], [0, 0], [1, 1]),
        ] {
            let op = Op::UpdateSlice {
                starts: dims(starts),
                steps: dims(steps),
            };
            check(op, &[x.clone(), wild(dtype, update, 5)]);
        }
    }
}

#[test]
fn gathers() {
    for dtype in DType::ALL {
        let x = wild(dtype, [4, 5, 6], 1);
        for (axis, shape) in [
            (0, [7, 5, 6]),
            (1, [4, 2, 6]),
            (2, [3, 4, 9]),
            (1, [2, 8, 1]),
            (0, [0, 5, 6]),
        ] {
            let extent = x.ty().shape[axis];
            check(
                Op::Gather { axis },
                &[x.clone(), random_indices(DType::I64, shape, extent, 3)],
            );
        }
        for axis in 0..3 {
            let extent = x.ty().shape[axis];
            check(
                Op::IndexSelect { axis },
                &[x.clone(), random_indices(DType::I32, [9], extent, 4)],
            );
            check(
                Op::IndexSelect { axis },
                &[x.clone(), random_indices(DType::U8, [0], extent, 4)],
            );
        }
    }
    for dtype in INTS {
        check(
            Op::Gather { axis: 0 },
            &[random(DType::F32, [9], 1), random_indices(dtype, [4], 9, 2)],
        );
    }
}

#[test]
fn scatters_in_every_mode() {
    for dtype in DType::ALL {
        for &mode in ScatterMode::ALL {
            if dtype == DType::Bool && mode != ScatterMode::Assign {
                continue;
            }
            for (axis, shape) in [(0, [7, 5, 3]), (1, [4, 12, 3]), (2, [3, 4, 4]), (1, [4, 0, 3])] {
                for (x, updates) in [
                    (random(dtype, [4, 5, 3], 1), random(dtype, shape, 2)),
                    (wild(dtype, [4, 5, 3], 1), wild(dtype, shape, 2)),
                ] {
                    let indices = random_indices(DType::I64, shape, [4, 5, 3][axis], 3);
                    check_by(
                        Op::Scatter { axis, mode },
                        &[x, indices, updates],
                        Relative::Tensor,
                        1.0,
                    );
                }
            }
            for axis in 0..3 {
                let shape = Shape::from([4, 5, 3]);
                let indices = random_indices(DType::I64, [11], shape[axis], 5);
                let updates = shape.with(axis, 11);
                check_by(
                    Op::IndexPut { axis, mode },
                    &[
                        random(dtype, shape.clone(), 1),
                        indices.clone(),
                        random(dtype, updates.clone(), 2),
                    ],
                    Relative::Tensor,
                    1.0,
                );
                check_by(
                    Op::IndexPut { axis, mode },
                    &[wild(dtype, shape, 1), indices, wild(dtype, updates, 2)],
                    Relative::Tensor,
                    1.0,
                );
            }
        }
    }
}

#[test]
fn sorting() {
    for dtype in DType::ALL {
        for descending in [false, true] {
            for (axis, shape) in [(0, [9, 4]), (1, [3, 30]), (1, [3, 1])] {
                // Small random integers repeat, so stability shows.
                for x in [random(dtype, shape, 1), wild(dtype, shape, 2)] {
                    check(
                        Op::Sort {
                            axis,
                            descending,
                            dtype: DType::I64,
                        },
                        &[x],
                    );
                }
            }
            check(
                Op::Sort {
                    axis: 1,
                    descending,
                    dtype: DType::I32,
                },
                &[random(dtype, [3, 0], 1)],
            );
        }
        if dtype != DType::Bool {
            for k in [0, 1, 4, 9] {
                for x in [random(dtype, [9, 4], 1), wild(dtype, [9, 4], 2)] {
                    check(
                        Op::TopK {
                            axis: 0,
                            k,
                            dtype: DType::I64,
                        },
                        &[x],
                    );
                }
            }
        }
    }
    let zeros = HostTensor::from_vec(
        [6],
        [0.0f32, -0.0, f32::INFINITY, f32::NAN, f32::INFINITY, f32::NAN],
    );
    check(
        Op::Sort {
            axis: 0,
            descending: true,
            dtype: DType::I64,
        },
        &[zeros],
    );
}

#[test]
fn random_numbers_are_the_generator_s() {
    let seed = scalar(DType::U64, 0x9e37_79b9_7f4a_7c15u64);
    let stream = scalar(DType::U64, u64::MAX - 3);
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        for kind in [RandomKind::Uniform, RandomKind::Normal] {
            let op = Op::Random {
                kind,
                dtype,
                shape: Shape::from([3, 5]),
            };
            check(op, &[seed.clone(), stream.clone()]);
        }
    }
    for dtype in INTS {
        for (low, high) in [(-3, 9), (5, 5), (i64::MIN, i64::MAX)] {
            let op = Op::Random {
                kind: RandomKind::IntRange,
                dtype,
                shape: Shape::from([17]),
            };
            check(
                op,
                &[
                    seed.clone(),
                    stream.clone(),
                    scalar(DType::I64, low),
                    scalar(DType::I64, high),
                ],
            );
        }
    }
}

#[test]
fn types_of_constants() {
    for dtype in DType::ALL {
        for value in [
            kiln_graph::Scalar::Float(2.75),
            kiln_graph::Scalar::Int(-3),
            kiln_graph::Scalar::UInt(u64::MAX),
        ] {
            let got = check_sum(Op::Constant { value, dtype }, &[]);
            assert_eq!(*got[0].ty(), ty(dtype, []));
        }
    }
}
