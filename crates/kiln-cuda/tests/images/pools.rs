//! Pools, and gradients from any indices.

use std::fmt::Write;

use kiln_cuda::testing::host::{Differential, HostStep, Outcome};
use kiln_graph::op::Window;
use kiln_graph::{Graph, HostTensor};

use crate::convolution::{FLOATS, bare, check, each, list, parse, same};

/// A pool, and the type of its indices.
#[derive(Clone, Copy)]
pub struct Pool {
    images: usize,
    channels: usize,
    input: &'static [usize],
    size: &'static [usize],
    stride: &'static [usize],
    low: &'static [usize],
    high: &'static [usize],
    dilation: &'static [usize],
    ceil: bool,
    padding: bool,
    indices: &'static str,
}

impl Pool {
    fn window(&self) -> Window {
        let dims = |list: &[usize]| list.iter().copied().collect();
        Window {
            size: dims(self.size),
            stride: dims(self.stride),
            pad_low: dims(self.low),
            pad_high: dims(self.high),
            dilation: dims(self.dilation),
            ceil_mode: self.ceil,
        }
    }

    pub fn output(&self) -> Vec<usize> {
        self.extents(&self.window())
    }

    fn extents(&self, window: &Window) -> Vec<usize> {
        (0..self.input.len())
            .map(|axis| window.output_extent(axis, self.input[axis]).unwrap())
            .collect()
    }

    /// All pools and their gradients; channels first, or last.
    pub fn graph(&self, dtype: &str, last: bool) -> Graph {
        let dims = self.input.len();
        let window = |dilation: &[usize]| {
            let [size, stride, low, high] = [self.size, self.stride, self.low, self.high].map(list);
            let ceil = if self.ceil { ", ceil_mode=true" } else { "" };
            format!(
                "size={size}, stride={stride}, pad_low={low}, pad_high={high}, dilation={}{ceil}",
                list(dilation)
            )
        };
        let input = list(self.input);
        let x = format!("[{},{},{}]", self.images, self.channels, bare(self.input));
        let y = format!("[{},{},{}]", self.images, self.channels, bare(&self.output()));
        let (x, i, y) = (
            format!("{dtype}{x}"),
            format!("{}{y}", self.indices),
            format!("{dtype}{y}"),
        );
        let plain = window(self.dilation);
        // Means have no dilation.
        let ones = vec![1; dims];
        let undilated = Window {
            dilation: ones.iter().copied().collect(),
            ..self.window()
        };
        let means = self.extents(&undilated);
        let means = format!("{dtype}[{},{},{}]", self.images, self.channels, bare(&means));
        let mean = format!(
            "{}{}",
            window(&ones),
            if self.padding {
                ", count_include_pad=true"
            } else {
                ""
            }
        );
        let mut text = format!("graph @pool {{\n  %0 = parameter 0 : {x}\n  %1 = parameter 1 : {y}\n");
        let (mut image, mut gradient) = ("0", "1");
        if last {
            text += &same("2", "0", &x, dims);
            text += &same("3", "1", &y, dims);
            (image, gradient) = ("2", "3");
        }
        let _ = writeln!(text, "  %4 = max_pool %{image} {{{plain}}} : {y}");
        let _ = writeln!(
            text,
            "  %5, %6 = max_pool_with_indices %{image} {{{plain}}} : {y}, {i}"
        );
        let _ = writeln!(
            text,
            "  %7 = max_pool_grad %{gradient}, %6 {{input={input}}} : {x}"
        );
        let _ = writeln!(text, "  %8 = avg_pool %{image} {{{mean}}} : {means}");
        let of_means = if means == y { gradient } else { "8" };
        let _ = writeln!(
            text,
            "  %9 = avg_pool_grad %{of_means} {{{mean}, input={input}}} : {x}"
        );
        // In one layout the indices are a result, in the other they are not and are stored as images are.
        if last {
            for (name, of, ty) in [
                ("10", "4", &y),
                ("11", "5", &y),
                ("12", "7", &x),
                ("13", "8", &means),
                ("14", "9", &x),
            ] {
                text += &same(name, of, ty, dims);
            }
            text += "  return %10, %11, %12, %13, %14\n}";
        } else {
            text += "  return %4, %5, %6, %7, %8, %9\n}";
        }
        parse(&text)
    }
}

pub fn pools() -> Vec<(&'static str, Pool)> {
    let usual = Pool {
        images: 2,
        channels: 8,
        input: &[9, 11],
        size: &[3, 3],
        stride: &[2, 2],
        low: &[1, 1],
        high: &[1, 1],
        dilation: &[1, 1],
        ceil: false,
        padding: true,
        indices: "i64",
    };
    vec![
        ("the usual", usual),
        (
            "odd channels",
            Pool {
                channels: 7,
                padding: false,
                indices: "i32",
                ..usual
            },
        ),
        (
            "one channel",
            Pool {
                channels: 1,
                indices: "u32",
                ..usual
            },
        ),
        (
            "side by side",
            Pool {
                channels: 12,
                input: &[8, 6],
                size: &[2, 2],
                low: &[0, 0],
                high: &[0, 0],
                ..usual
            },
        ),
        (
            "overlapping",
            Pool {
                channels: 4,
                stride: &[1, 1],
                padding: false,
                ..usual
            },
        ),
        (
            "rounded up",
            Pool {
                input: &[8, 10],
                low: &[0, 1],
                high: &[0, 1],
                ceil: true,
                padding: false,
                ..usual
            },
        ),
        (
            "rounded up, padding counted",
            Pool {
                channels: 3,
                input: &[8, 10],
                stride: &[3, 2],
                high: &[0, 1],
                ceil: true,
                ..usual
            },
        ),
        (
            "padding alone",
            Pool {
                input: &[4, 5],
                size: &[2, 2],
                low: &[2, 3],
                high: &[2, 2],
                padding: false,
                ..usual
            },
        ),
        (
            "gaps between windows",
            Pool {
                size: &[2, 1],
                stride: &[3, 4],
                low: &[0, 0],
                high: &[0, 0],
                ..usual
            },
        ),
        (
            "the whole image",
            Pool {
                channels: 20,
                input: &[5, 7],
                size: &[5, 7],
                stride: &[1, 1],
                low: &[0, 0],
                high: &[0, 0],
                ..usual
            },
        ),
        (
            "small indices",
            Pool {
                channels: 2,
                input: &[17, 18],
                indices: "u8",
                ..usual
            },
        ),
        (
            "indices of 16 bits",
            Pool {
                channels: 8,
                input: &[182, 184],
                size: &[2, 2],
                stride: &[3, 3],
                low: &[0, 0],
                high: &[0, 0],
                indices: "u16",
                ..usual
            },
        ),
        (
            "one dimension",
            Pool {
                input: &[19],
                size: &[4],
                stride: &[3],
                low: &[2],
                high: &[1],
                dilation: &[1],
                ..usual
            },
        ),
        (
            "three dimensions",
            Pool {
                channels: 4,
                input: &[5, 4, 6],
                size: &[2, 3, 2],
                stride: &[2, 1, 2],
                low: &[1, 1, 0],
                high: &[0, 1, 1],
                dilation: &[1, 1, 1],
                ..usual
            },
        ),
        (
            "dilation",
            Pool {
                input: &[9, 12],
                low: &[1, 2],
                high: &[2, 1],
                dilation: &[2, 3],
                stride: &[1, 2],
                ..usual
            },
        ),
    ]
}

#[test]
fn pools_and_their_gradients() {
    let mut items = Vec::new();
    for (number, (what, pool)) in pools().into_iter().enumerate() {
        if what == "small indices" {
            // Indices of 8 bits wrap, which only the forward pool may meet.
            continue;
        }
        items.push((what, pool, FLOATS[number % 4], true));
        // Integers every second time.
        let first = match number % 2 {
            0 => FLOATS[(number / 2 + 1) % 4],
            _ => ["i32", "u8", "i64", "i16", "u64"][number / 2 % 5],
        };
        items.push((what, pool, first, false));
    }
    each(&items, |&(what, pool, dtype, last)| {
        let layout = if last { "last" } else { "first" };
        check(
            &pool.graph(dtype, last),
            &format!("pool {what}, {dtype}, channels {layout}"),
        );
    });
}

/// Gradients of a pool from indices that no pool of the graph made: many of one place, in any order.
#[test]
fn gradients_from_any_indices() {
    let items = [
        ("f32", "i64", 1000),
        ("bf16", "i32", 3),
        ("i32", "i64", 1),
        ("f64", "u8", 70_000),
    ];
    each(&items, |&(dtype, indices, channels)| {
        let (y, x) = ([2, channels, 3, 2], [5, 4]);
        let shape = bare(&y);
        let graph = parse(&format!(
            "graph @indices {{\n  %0 = parameter 0 : {dtype}[{shape}]\n  %1 = parameter 1 : {indices}[{shape}]\n  \
             %2 = max_pool_grad %0, %1 {{input={}}} : {dtype}[2,{channels},{}]\n  return %2\n}}",
            list(&x),
            bare(&x)
        ));
        let types: Vec<_> = graph
            .parameters()
            .iter()
            .map(|&value| graph.ty(value).clone())
            .collect();
        let values = (0..types[0].numel()).map(|i| ((i * 7919) % 23) as i64 - 11);
        let places = (0..types[1].numel()).map(|i| ((i * i * 31 + i / 3) % 20 / 3) as i64);
        let of = |number: usize, list: Vec<i64>| {
            let ty: &kiln_graph::TensorType = &types[number];
            match ty.dtype.is_float() {
                true => HostTensor::from_floats(ty.dtype, ty.shape.clone(), list.iter().map(|&x| x as f64)),
                false => HostTensor::from_ints(ty.dtype, ty.shape.clone(), list),
            }
        };
        let tensors = vec![of(0, values.collect()), of(1, places.collect())];
        let outcome = Differential::new(&graph).arguments(tensors, Vec::new()).check();
        assert_eq!(outcome, Ok(Outcome::Same), "{dtype} at {indices}");
    });
}

/// Sums of means wrap in 64 bits before they are divided, as sums of integers do.
#[test]
fn sums_of_means_wrap() {
    let graph = parse(
        "graph @means {
  %0 = parameter 0 : i64[1,1,4]
  %1 = parameter 1 : i64[1,1,3]
  %2 = avg_pool %0 {size=[2], stride=[2], pad_low=[0], pad_high=[0], dilation=[1]} : i64[1,1,2]
  %3 = avg_pool_grad %1 {size=[3], stride=[1], pad_low=[2], pad_high=[2], dilation=[1], input=[1]} : i64[1,1,1]
  return %2, %3
}",
    );
    let of = |list: &[i64]| {
        HostTensor::from_ints(kiln_graph::DType::I64, [1, 1, list.len()], list.iter().copied())
    };
    let tensors = vec![
        of(&[i64::MAX, 1, i64::MIN, -1]),
        // The one place is the only one of each window.
        of(&[i64::MAX, i64::MAX, 5]),
    ];
    let comparison = Differential::new(&graph).arguments(tensors, Vec::new());
    let host = HostStep::of(&comparison.compile().unwrap()).unwrap();
    let found = comparison.run(&host).unwrap();
    assert_eq!(found[0].to_i64s(), [i64::MIN / 2, i64::MAX / 2]);
    assert_eq!(found[1].to_i64s(), [3]);
}
