//! Pooling and its gradients, of random windows.

use kiln_cpu::kernels::conv::PixelPlace;
use kiln_cpu::kernels::element::Storage;
use kiln_cpu::kernels::pool::channels::{self, ChannelPool, Indices, Memory};
use kiln_cpu::kernels::pool::{self, PoolGeometry, PoolKind, PoolSpec};
use kiln_cpu::kernels::{KernelText, Param, Width};
use kiln_cpu::{Isa, Toolchain};

use crate::harness::{Random, instruction_sets, run};

#[derive(Debug, Clone)]
struct Case {
    kind: PoolKind,
    geometry: PoolGeometry,
}

impl Case {
    fn random(random: &mut Random) -> Self {
        let kind = random.pick(&[
            PoolKind::Max,
            PoolKind::Max,
            PoolKind::Mean { count_padding: true },
            PoolKind::Mean { count_padding: false },
        ]);
        let mut g = PoolGeometry {
            images: 1 + random.below(2),
            channels: 1 + random.below(4),
            input: [0; 2],
            output: [0; 2],
            window: [0; 2],
            stride: [0; 2],
            pad_low: [0; 2],
            pad_high: [0; 2],
            dilation: [1; 2],
        };
        for d in 0..2 {
            g.window[d] = 1 + random.below(4);
            g.stride[d] = 1 + random.below(3);
            g.pad_low[d] = random.below(g.window[d] / 2 + 1);
            g.pad_high[d] = random.below(g.window[d] / 2 + 1);
            if kind == PoolKind::Max {
                g.dilation[d] = random.pick(&[1, 1, 2]);
            }
            let span = (g.window[d] - 1) * g.dilation[d] + 1;
            g.input[d] = span + random.below(40);
            let room = g.input[d] + g.pad_low[d] + g.pad_high[d] - span;
            // A last window that does not fit, now and then.
            let up = usize::from(random.below(3) == 0 && !room.is_multiple_of(g.stride[d]));
            g.output[d] = room / g.stride[d] + 1 + up;
        }
        Self { kind, geometry: g }
    }

    fn kernels(&self, name: usize, isa: Isa) -> [KernelText; 2] {
        let g = self.geometry;
        let element = |pointer: &'static str, [height, width]: [usize; 2]| {
            move |place: &PixelPlace<'_>| {
                let at = format!(
                    "({pointer} + ({} * {} + {}) * {} + {} * {width} + {})",
                    place.image,
                    g.channels,
                    place.channel,
                    height * width,
                    place.at[1],
                    place.at[2]
                );
                (at, place.width)
            }
        };
        let load = |pointer, extents| {
            let element = element(pointer, extents);
            move |place: &PixelPlace<'_>| match element(place) {
                (at, Width::Scalar) => format!("*{at}"),
                (at, Width::Vector) => format!("vf_load({at})"),
            }
        };
        let store = |extents| {
            let (out, indices) = (element("out", extents), element("winners", extents));
            let max = self.kind == PoolKind::Max;
            move |place: &PixelPlace<'_>, value: &str, index: &str| {
                let (at, width) = out(place);
                let (place, _) = indices(place);
                match width {
                    Width::Scalar if max => format!("*{at} = {value};\n*{place} = (float){index};"),
                    Width::Vector if max => {
                        format!("vf_store({at}, {value});\nvf_store({place}, vf_from_vi({index}));")
                    }
                    Width::Scalar => format!("*{at} = {value};"),
                    Width::Vector => format!("vf_store({at}, {value});"),
                }
            }
        };
        let plain = |extents| {
            let out = element("out", extents);
            move |place: &PixelPlace<'_>, value: &str, _: &str| match out(place) {
                (at, Width::Scalar) => format!("*{at} = {value};"),
                (at, Width::Vector) => format!("vf_store({at}, {value});"),
            }
        };
        let forward = PoolSpec {
            name: format!("pool{name}"),
            comment: format!("{self:?}"),
            kind: self.kind,
            geometry: g,
            load: Box::new(load("a", g.input)),
            index: None,
            consume: Box::new(store(g.output)),
            params: vec![
                Param::new("const float *", "a"),
                Param::new("float *", "out"),
                Param::new("float *", "winners"),
            ],
            threads: 3,
        };
        let grad = PoolSpec {
            name: format!("pool_grad{name}"),
            comment: format!("{self:?}"),
            kind: self.kind,
            geometry: g,
            load: Box::new(load("a", g.output)),
            index: Some(Box::new({
                let element = element("winners", g.output);
                move |place| format!("(int64_t)*{}", element(place).0)
            })),
            consume: Box::new(plain(g.input)),
            params: vec![
                Param::new("const float *", "a"),
                Param::new("const float *", "winners"),
                Param::new("float *", "out"),
            ],
            threads: 3,
        };
        [pool::forward(forward, isa), pool::input_grad(grad, isa)]
    }

    /// Result, indices and input gradient, by definition.
    fn reference(&self, x: &[f32], dy: &[f32]) -> [Vec<f64>; 3] {
        let g = &self.geometry;
        let (plane_in, plane_out) = (g.input[0] * g.input[1], g.output[0] * g.output[1]);
        let planes = g.images * g.channels;
        let mut result = vec![0f64; planes * plane_out];
        let mut winners = vec![0f64; planes * plane_out];
        let mut dx = vec![0f64; planes * plane_in];
        for o in 0..planes * plane_out {
            let (plane, oy, ox) = (o / plane_out, o % plane_out / g.output[1], o % g.output[1]);
            let mut counted = 0;
            let mut inside = Vec::new();
            for ty in 0..g.window[0] {
                for tx in 0..g.window[1] {
                    let y = (oy * g.stride[0] + ty * g.dilation[0]) as i64 - g.pad_low[0] as i64;
                    let x = (ox * g.stride[1] + tx * g.dilation[1]) as i64 - g.pad_low[1] as i64;
                    let (height, width) = (g.input[0] as i64, g.input[1] as i64);
                    let padded = y < height + g.pad_high[0] as i64 && x < width + g.pad_high[1] as i64;
                    counted += usize::from(padded);
                    if (0..height).contains(&y) && (0..width).contains(&x) {
                        inside.push((y * width + x) as usize);
                    }
                }
            }
            match self.kind {
                PoolKind::Max => {
                    let mut best: Option<(f32, usize)> = None;
                    for &i in &inside {
                        let v = x[plane * plane_in + i];
                        let better = best.is_none_or(|(b, _)| v > b || (v.is_nan() && !b.is_nan()));
                        if better {
                            best = Some((v, i));
                        }
                    }
                    let (value, index) = best.unwrap_or((f32::NEG_INFINITY, 0));
                    result[o] = value.into();
                    winners[o] = index as f64;
                    dx[plane * plane_in + index] += f64::from(dy[o]);
                }
                PoolKind::Mean { count_padding } => {
                    let count = if count_padding { counted } else { inside.len() };
                    let sum: f64 = inside.iter().map(|&i| f64::from(x[plane * plane_in + i])).sum();
                    result[o] = if count == 0 { 0.0 } else { sum / count as f64 };
                    for &i in &inside {
                        dx[plane * plane_in + i] += f64::from(dy[o]) / count as f64;
                    }
                }
            }
        }
        [result, winners, dx]
    }
}

/// Planes to channels-last, or back.
fn turned(planes: &[f32], g: &PoolGeometry, back: bool) -> Vec<f32> {
    let pixels = planes.len() / (g.images * g.channels);
    let mut out = vec![0.0; planes.len()];
    for (at, &value) in planes.iter().enumerate() {
        let (image, rest) = (at / (g.channels * pixels), at % (g.channels * pixels));
        let (inner, outer) = if back {
            (g.channels, pixels)
        } else {
            (pixels, g.channels)
        };
        let (row, column) = (rest / inner, rest % inner);
        out[image * g.channels * pixels + column * outer + row] = value;
    }
    out
}

impl Case {
    /// The same over channels-last images: forward, and the gradient with indices that are known to be its
    /// own or not.
    fn by_channels(&self, name: usize, isa: Isa) -> [KernelText; 3] {
        let g = self.geometry;
        let memory = |pointer: &str, [height, width]: [usize; 2]| Memory {
            pointer: pointer.into(),
            strides: [
                (height * width * g.channels) as i64,
                0,
                (width * g.channels) as i64,
                g.channels as i64,
                1,
            ],
        };
        let max = self.kind == PoolKind::Max;
        let spec = |what: &str, grad: bool, own: bool| ChannelPool {
            name: format!("{what}{name}"),
            comment: format!("{self:?}"),
            kind: self.kind,
            geometry: g,
            storage: Storage::F32,
            input: memory("a", if grad { g.output } else { g.input }),
            output: memory("out", if grad { g.input } else { g.output }),
            indices: max.then(|| Indices {
                memory: memory("winners", g.output),
                ctype: "int32_t",
                own,
            }),
            params: if grad {
                vec![
                    Param::new("const float *", "a"),
                    Param::new("const int32_t *", "winners"),
                    Param::new("float *", "out"),
                ]
            } else {
                vec![
                    Param::new("const float *", "a"),
                    Param::new("float *", "out"),
                    Param::new("int32_t *", "winners"),
                ]
            },
            threads: 3,
        };
        [
            channels::forward(&spec("pool", false, false), isa),
            channels::input_grad(&spec("scatter", true, false), isa),
            channels::input_grad(&spec("gather", true, true), isa),
        ]
    }
}

fn close(got: &[f32], expected: &[f64]) -> bool {
    got.iter().zip(expected).all(|(&got, &expected)| {
        let same = f64::from(got) == expected || (got.is_nan() && expected.is_nan());
        same || (f64::from(got) - expected).abs() <= 1e-5 * expected.abs().max(0.1)
    })
}

/// An image with ties, infinities and NaN for each case, and the gradient of the result.
fn data(random: &mut Random, cases: &[Case]) -> Vec<[Vec<f32>; 2]> {
    cases
        .iter()
        .map(|case| {
            let g = &case.geometry;
            let planes = g.images * g.channels;
            let mut x = random.floats(planes * g.input[0] * g.input[1]);
            // Ties, infinities, NaN.
            x.iter_mut().step_by(3).for_each(|v| *v = (*v * 2.0).round());
            if case.kind == PoolKind::Max {
                x.iter_mut().step_by(17).for_each(|v| *v = f32::NEG_INFINITY);
                x.iter_mut().skip(5).step_by(101).for_each(|v| *v = f32::NAN);
            }
            [x, random.floats(planes * g.output[0] * g.output[1])]
        })
        .collect()
}

#[test]
fn channels_last_windows_match_the_definition() {
    let mut random = Random::new(43);
    let mut cases: Vec<Case> = (0..12).map(|_| Case::random(&mut random)).collect();
    cases
        .iter_mut()
        .for_each(|case| case.geometry.channels = random.pick(&[1, 5, 16, 20, 37]));
    let data = data(&mut random, &cases);
    let references: Vec<[Vec<f64>; 3]> = cases
        .iter()
        .zip(&data)
        .map(|(case, [x, dy])| case.reference(x, dy))
        .collect();
    // Indices are integers in the memory of floats.
    let places: Vec<Vec<f32>> = references
        .iter()
        .map(|r| r[1].iter().map(|&i| f32::from_bits(i as u32)).collect())
        .collect();
    let mut inputs: Vec<Vec<f32>> = Vec::new();
    let mut outputs: Vec<Vec<f32>> = Vec::new();
    for ((case, [x, dy]), places) in cases.iter().zip(&data).zip(&places) {
        let g = &case.geometry;
        let [x, dy, places] = [x, dy, places].map(|planes| turned(planes, g, false));
        inputs.extend([x.clone(), dy.clone(), places.clone(), dy.clone(), places.clone()]);
        outputs.extend([dy, places, x.clone(), x]);
    }
    let inputs: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
    let outputs: Vec<&[f32]> = outputs.iter().map(Vec::as_slice).collect();
    let toolchain = Toolchain::detect().unwrap();
    for isa in instruction_sets(&toolchain) {
        let kernels: Vec<KernelText> = cases
            .iter()
            .enumerate()
            .flat_map(|(i, case)| case.by_channels(i, isa))
            .collect();
        let results = run(&toolchain, isa, &kernels, &inputs, &outputs);
        for (((case, reference), places), result) in
            cases.iter().zip(&references).zip(&places).zip(results.chunks(4))
        {
            let result: Vec<Vec<f32>> = result
                .iter()
                .map(|one| turned(one, &case.geometry, true))
                .collect();
            assert!(close(&result[0], &reference[0]), "{isa} result of {case:?}");
            if case.kind == PoolKind::Max {
                let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&result[1]), bits(places), "{isa} indices of {case:?}");
            }
            assert!(
                close(&result[2], &reference[2]),
                "{isa} scattered gradient of {case:?}"
            );
            assert!(
                close(&result[3], &reference[2]),
                "{isa} gathered gradient of {case:?}"
            );
        }
    }
}

#[test]
fn random_windows_match_the_definition() {
    let mut random = Random::new(41);
    let cases: Vec<Case> = (0..16).map(|_| Case::random(&mut random)).collect();
    let data = data(&mut random, &cases);
    let references: Vec<[Vec<f64>; 3]> = cases
        .iter()
        .zip(&data)
        .map(|(case, [x, dy])| case.reference(x, dy))
        .collect();
    let winners: Vec<Vec<f32>> = references
        .iter()
        .map(|r| r[1].iter().map(|&i| i as f32).collect())
        .collect();
    let inputs: Vec<&[f32]> = data
        .iter()
        .zip(&winners)
        .flat_map(|([x, dy], w)| [&x[..], &dy[..], &w[..]])
        .collect();
    let outputs: Vec<&[f32]> = data
        .iter()
        .flat_map(|[x, dy]| [&dy[..], &dy[..], &x[..]])
        .collect();
    let toolchain = Toolchain::detect().unwrap();
    for isa in instruction_sets(&toolchain) {
        let kernels: Vec<KernelText> = cases
            .iter()
            .enumerate()
            .flat_map(|(i, case)| case.kernels(i, isa))
            .collect();
        let results = run(&toolchain, isa, &kernels, &inputs, &outputs);
        for ((case, reference), result) in cases.iter().zip(&references).zip(results.chunks(3)) {
            assert!(close(&result[0], &reference[0]), "{isa} result of {case:?}");
            if case.kind == PoolKind::Max {
                assert!(close(&result[1], &reference[1]), "{isa} indices of {case:?}");
            }
            assert!(close(&result[2], &reference[2]), "{isa} gradient of {case:?}");
        }
    }
}

/// Sums of 16 bits are in memory for no more vectors of channels than there are.
#[test]
fn gradients_by_channels_take_no_memory_for_more_threads() {
    let geometry = PoolGeometry {
        images: 1,
        channels: 4,
        input: [4096, 4096],
        output: [2048, 2048],
        window: [2, 2],
        stride: [2, 2],
        pad_low: [0, 0],
        pad_high: [0, 0],
        dilation: [1, 1],
    };
    let memory = |pointer: &str, [height, width]: [i64; 2]| Memory {
        pointer: pointer.into(),
        strides: [height * width * 4, 0, width * 4, 4, 1],
    };
    let bytes = |threads: usize| {
        let spec = ChannelPool {
            name: "scatter".into(),
            comment: String::new(),
            kind: PoolKind::Max,
            geometry,
            storage: Storage::BF16,
            input: memory("a", [2048, 2048]),
            output: memory("out", [4096, 4096]),
            indices: Some(Indices {
                memory: memory("winners", [2048, 2048]),
                ctype: "int64_t",
                own: false,
            }),
            params: Vec::new(),
            threads,
        };
        channels::input_grad(&spec, Isa::Avx2).workspace_bytes
    };
    // A vector has eight channels.
    assert_eq!(bytes(1), 4096 * 4096 * 8 * 4);
    assert_eq!(bytes(16), bytes(1));
}
