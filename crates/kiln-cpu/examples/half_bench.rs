//! Products, convolutions and attention of bf16 beside those of f32, and beside what the units can do.
//!
//! `cargo run --release -p kiln-cpu --example half_bench [threads] [shape...]`
//!
//! Shapes are those of `kernel_bench`: `1024x688x256nt`, `32*128x128x64nt`, `conv:8x64x56-64k3s1g1` (forward
//! and both gradients, channels-last), and `attention:32x128x64` (heads, positions, width; forward and
//! gradient). Each line has the best rate of f32, of bf16 with results of bf16, and of bf16 with results of
//! f32, their share of the rate at which registers alone can be multiplied (of f32, and of pairs or tiles of
//! bf16, on as many threads), and the time of f32 by that of bf16. The kernels of a line and the two loops on
//! registers take turns; a share is the median of those of the turns, because what a virtual processor can do
//! changes with what its neighbours do, within seconds by a factor of two.

use std::time::{Duration, Instant};

use kiln_cpu::kernels::attention::{self, AttentionSpec, Extents, Gradients, Skips, View};
use kiln_cpu::kernels::conv::{self, ConvSpec, Geometry, Image, PixelEpilogue, WeightGradSpec};
use kiln_cpu::kernels::element::Storage;
use kiln_cpu::kernels::gemm::{self, Epilogue, GemmSpec, Operand};
use kiln_cpu::kernels::{KernelText, Param, standalone};
use kiln_cpu::{AlignedBuffer, BuildOptions, Isa, Library, NoHooks, StepArguments, ThreadPool, Toolchain};

const SHAPES: &[&str] = &[
    "1024x1024x1024nn",
    // llama-tiny: projections, feed-forward, logits and their gradients.
    "1024x256x256nn",
    "1024x688x256nn",
    "1024x256x688nt",
    "256x688x1024tn",
    "1024x4096x256nt",
    // bert-minilm.
    "1024x384x384nt",
    "1024x1536x384nt",
    "384x1536x1024tn",
    // Batches, small and skinny.
    "32*128x128x64nt",
    "32*128x64x128nn",
    "8x1024x1024nt",
    "64x64x64nn",
    // resnet.
    "conv:8x64x56-64k3s1g1",
    "conv:8x128x28-128k3s1g1",
    "conv:8x256x14-256k3s1g1",
    "conv:8x512x7-512k3s1g1",
    "conv:8x128x56-128k3s2g1",
    "conv:4x256x56-64k1s1g1",
    "conv:4x64x56-256k1s1g1",
    // llama-tiny, bert-minilm, vit.
    "attention:32x128x64",
    "attention:96x128x32",
    "attention:12x1024x64",
];

/// How operands and result are stored.
const TYPES: [[Storage; 2]; 3] = [
    [Storage::F32, Storage::F32],
    [Storage::BF16, Storage::BF16],
    [Storage::BF16, Storage::F32],
];

/// Each kernel of a line runs so often.
const TURNS: usize = 25;

#[path = "harness/limits.rs"]
mod limits;

use limits::{Limits, Peak};

/// Rounds of a loop on registers in a turn: some milliseconds.
const ROUNDS: usize = 50_000;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let threads: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let shapes: Vec<String> = arguments.collect();
    let toolchain = Toolchain::detect()?;
    let mut bench = Bench {
        pool: ThreadPool::new(threads),
        peaks: [
            Peak::of_f32(&toolchain, threads, ROUNDS)?,
            Peak::of_bf16(&toolchain, threads, ROUNDS)?,
        ],
        toolchain,
    };
    let isa = bench.toolchain.isa();
    let limits = Limits::measure(&bench.toolchain, &bench.pool)?;
    println!(
        "{} on {isa}, {threads} threads; {limits}",
        bench.toolchain.version()
    );
    if shapes.is_empty() {
        SHAPES.iter().try_for_each(|shape| bench.shape(shape))
    } else {
        shapes.iter().try_for_each(|shape| bench.shape(shape))
    }
}

struct Bench {
    toolchain: Toolchain,
    pool: ThreadPool,
    /// Registers alone, of f32 and of bf16.
    peaks: [Peak; 2],
}

/// A kernel, and the bytes of its parameters.
struct Case {
    kernel: KernelText,
    bytes: Vec<usize>,
}

impl Bench {
    fn isa(&self) -> Isa {
        self.toolchain.isa()
    }

    fn shape(&mut self, shape: &str) -> Result<(), Error> {
        match shape.split_once(':') {
            Some(("attention", rest)) => self.attention(shape, rest),
            Some((_, rest)) => self.conv(shape, rest),
            None => self.product(shape),
        }
    }

    fn product(&mut self, shape: &str) -> Result<(), Error> {
        let (batch, one) = shape.split_once('*').unwrap_or(("1", shape));
        let batch: usize = batch.parse()?;
        let (sizes, order) = one.split_at(one.find(['n', 't']).unwrap_or(one.len()));
        let [m, n, k] = numbers(sizes)?;
        let all = |stride: usize| [(batch, stride as i64)];
        let transposed = |index| order.chars().nth(index) == Some('t');
        let (a_free, a_depth) = if transposed(0) {
            (1, m as i64)
        } else {
            (k as i64, 1)
        };
        let (b_free, b_depth) = if transposed(1) {
            (k as i64, 1)
        } else {
            (1, n as i64)
        };
        let cases = TYPES.map(|[of, to]| {
            let spec = GemmSpec {
                name: "gemm".into(),
                comment: shape.into(),
                batch,
                m,
                n,
                k,
                a: Operand::stored(of, "left", &all(m * k), a_free, a_depth),
                b: Operand::stored(of, "right", &all(k * n), b_free, b_depth),
                epilogue: Epilogue::store_as(to, "out", &all(m * n), n as i64, 1),
                params: params([of, to]),
                threads: self.pool.threads(),
            };
            Case {
                kernel: gemm::emit(spec, self.isa()),
                bytes: bytes([m * k, k * n, m * n].map(|each| each * batch), [of, of, to]),
            }
        });
        self.line(shape, cases, 2.0 * (batch * m * n * k) as f64)
    }

    fn conv(&mut self, shape: &str, rest: &str) -> Result<(), Error> {
        let text = rest.replace(['-', 'k', 's', 'g'], "x");
        let [images, channels, size, out_channels, kernel, stride, groups] = numbers(&text)?;
        let pad = kernel / 2;
        let output = (size + 2 * pad - kernel) / stride + 1;
        let geometry = Geometry {
            images,
            groups,
            in_channels: channels,
            out_channels,
            input: [1, size, size],
            output: [1, output, output],
            kernel: [1, kernel, kernel],
            stride: [1, stride, stride],
            pad: [0, pad, pad],
            dilation: [1; 3],
        };
        let strides = |channels: usize, size: usize| {
            let (c, s) = (channels as i64, size as i64);
            [s * s * c, s * s * c, s * c, c, 1]
        };
        let (input, out) = (strides(channels, size), strides(out_channels, output));
        let x = images * channels * size * size;
        let y = images * out_channels * output * output;
        let w = geometry.weight_len();
        let flops = 2.0 * (images * output * output * w) as f64;
        let correlation = |forward: bool| {
            TYPES.map(|[of, to]| {
                let (image, result) = if forward { (input, out) } else { (out, input) };
                let spec = ConvSpec {
                    name: "conv".into(),
                    comment: shape.into(),
                    geometry,
                    image: Image::stored(of, "left", image),
                    weight: "right".into(),
                    storage: of,
                    epilogue: PixelEpilogue::store_as(to, "out", result),
                    params: params([of, to]),
                    threads: self.pool.threads(),
                };
                let (kernel, lengths) = if forward {
                    (conv::forward(spec, self.isa()), [x, w, y])
                } else {
                    (conv::input_grad(spec, self.isa()), [y, w, x])
                };
                let bytes = bytes(lengths, [of, of, to]);
                Case { kernel, bytes }
            })
        };
        let weight_grad = TYPES.map(|[of, to]| {
            let spec = WeightGradSpec {
                name: "conv".into(),
                comment: shape.into(),
                geometry,
                input: Image::stored(of, "left", input),
                output_grad: Image::stored(of, "right", out),
                storage: of,
                consume: Box::new(move |width, index, value| {
                    to.store(width, &format!("out + {index}"), value)
                }),
                params: params([of, to]),
                threads: self.pool.threads(),
            };
            let kernel = conv::weight_grad(spec, self.isa());
            let bytes = bytes([x, y, w], [of, of, to]);
            Case { kernel, bytes }
        });
        let [forward, input_grad] = [true, false].map(correlation);
        self.line(shape, forward, flops)?;
        self.line("       input gradient", input_grad, flops)?;
        self.line("       weight gradient", weight_grad, flops)
    }

    fn attention(&mut self, shape: &str, rest: &str) -> Result<(), Error> {
        let [heads, positions, width] = numbers(rest)?;
        let flops = 4.0 * (heads * positions * positions * width) as f64;
        let types = TYPES.map(|[of, _]| of);
        let case = |of, gradient| self.attention_case([heads, positions, width], of, gradient);
        let [forward, gradient] = [false, true].map(|gradient| types.map(|of| case(of, gradient)));
        self.line(shape, forward, flops)?;
        self.line("       gradient", gradient, 2.5 * flops)
    }

    fn attention_case(&self, [heads, positions, width]: [usize; 3], of: Storage, gradient: bool) -> Case {
        let count = heads * positions * width;
        let strides = [count, positions * width, width, 1].map(|stride| stride as i64);
        let view = |name: &str| View {
            pointer: name.into(),
            strides,
        };
        let ctype = of.ctype();
        let tensor = |name| (format!("const {ctype} *"), name, bytes([count; 3], [of; 3])[0]);
        let made = |name| (format!("{ctype} *"), name, bytes([count; 3], [of; 3])[0]);
        let scalar = |name| ("const float *".to_owned(), name, 4);
        let stats_bytes = heads * positions * 8;
        let mut params = vec![
            tensor("query"),
            tensor("key"),
            tensor("value"),
            scalar("scale_at"),
        ];
        let mut names = vec!["scale"];
        if gradient {
            params.extend([
                tensor("d_out"),
                ("const float *".to_owned(), "stats", stats_bytes),
            ]);
            params.extend([scalar("d_scale_at"), scalar("inner_at")]);
            params.extend([made("d_query"), made("d_key"), made("d_value")]);
            names.extend(["d_scale", "inner"]);
        } else {
            params.extend([made("out"), ("float *".to_owned(), "stats", stats_bytes)]);
        }
        let spec = AttentionSpec {
            name: "attention".into(),
            extents: Extents {
                batch: 1,
                heads,
                key_heads: heads,
                queries: positions,
                keys: positions,
                width,
                value_width: width,
            },
            storage: of,
            numbers: names.into_iter().map(|name| (name, Storage::F32)).collect(),
            query: view("query"),
            key: view("key"),
            value: view("value"),
            causal: false,
            mask: None,
            hidden: None,
            mask_last: false,
            skips: Skips::Never,
            dropout: false,
            drop_scores: false,
            safe: false,
            stats: "stats".into(),
            params: params
                .iter()
                .map(|(ctype, name, _)| Param::new(ctype.as_str(), *name))
                .collect(),
            threads: self.pool.threads(),
            tallest: false,
        };
        let kernel = if gradient {
            let tensors = Gradients {
                d_out: view("d_out"),
                d_query: view("d_query"),
                d_key: view("d_key"),
                d_value: view("d_value"),
            };
            attention::gradient(&spec, &tensors, self.isa())
        } else {
            attention::forward(&spec, &view("out"), self.isa())
        };
        let bytes = params.into_iter().map(|(_, _, bytes)| bytes).collect();
        Case { kernel, bytes }
    }

    /// Prints the rates of kernels of f32, of bf16, and of bf16 with results of f32.
    fn line(&mut self, name: &str, cases: [Case; 3], flops: f64) -> Result<(), Error> {
        let best = self.best(cases, flops)?;
        let rates = best.map(|(best, _)| flops / best.as_nanos() as f64);
        let share = |case: usize| 100.0 * best[case].1;
        println!(
            "{name:26} f32 {:6.1} GFLOP/s ({:3.0} %), bf16 {:6.1} ({:3.0} %), to f32 {:6.1} ({:3.0} %), {:.2} and {:.2} times f32",
            rates[0],
            share(0),
            rates[1],
            share(1),
            rates[2],
            share(2),
            rates[1] / rates[0],
            rates[2] / rates[0],
        );
        Ok(())
    }

    /// The shortest time of each kernel, and the median of its shares of what registers alone did in the same
    /// turn: the first kernel's of the first loop, the others' of the second.
    fn best<const N: usize>(&mut self, cases: [Case; N], flops: f64) -> Result<[(Duration, f64); N], Error> {
        let mut steps = Vec::new();
        for case in &cases {
            let files = standalone::step(std::slice::from_ref(&case.kernel), self.isa());
            let built = self.toolchain.build(&files, &BuildOptions::default())?;
            let mut memory = Vec::new();
            for &bytes in &case.bytes {
                let mut buffer = AlignedBuffer::zeroed(bytes)?;
                // Numbers about one, as f32 and as bf16.
                let halves = buffer.as_mut_slice().chunks_exact_mut(2);
                halves
                    .enumerate()
                    .for_each(|(i, half)| half.copy_from_slice(&[(i * 31 % 256) as u8, 0x3f]));
                memory.push(buffer);
            }
            let arena = AlignedBuffer::zeroed(case.kernel.workspace_bytes)?;
            steps.push((
                Library::load(built.path())?.step(),
                memory,
                arena,
                &case.kernel.params,
            ));
        }
        let mut best = [Duration::MAX; N];
        let mut shares = [const { Vec::new() }; N];
        for _ in 0..TURNS {
            let [f32, bf16] = &mut self.peaks;
            let mut peaks = [0.0; 2];
            for _ in 0..2 {
                for (peak, of) in peaks.iter_mut().zip([&mut *f32, &mut *bf16]) {
                    *peak = f64::max(*peak, of.rate(&self.pool)?);
                }
            }
            for (case, (step, memory, arena, params)) in steps.iter_mut().enumerate() {
                let mut least = Duration::MAX;
                let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
                for (param, buffer) in params.iter().zip(memory.iter_mut()) {
                    match standalone::is_input(param) {
                        true => inputs.push(buffer.as_ptr()),
                        false => outputs.push(buffer.as_mut_ptr()),
                    }
                }
                // The second run finds its operands as the last one left them, as in a step.
                for _ in 0..2 {
                    let arguments = StepArguments {
                        inputs: &inputs,
                        outputs: &outputs,
                        arena,
                        scalars: &[],
                    };
                    let start = Instant::now();
                    // SAFETY: buffers of the sizes the kernel was generated for.
                    unsafe { step.run(&self.pool, arguments, &NoHooks) }?;
                    least = least.min(start.elapsed());
                }
                best[case] = best[case].min(least);
                shares[case].push(flops / least.as_nanos() as f64 / peaks[case.min(1)]);
            }
        }
        let median = |mut shares: Vec<f64>| {
            shares.sort_by(f64::total_cmp);
            shares[shares.len() / 2]
        };
        let mut shares = shares.into_iter().map(median);
        Ok(best.map(|best| (best, shares.next().unwrap_or(0.0))))
    }
}

/// Bytes of buffers of so many numbers.
fn bytes(lengths: [usize; 3], storage: [Storage; 3]) -> Vec<usize> {
    let size = |storage| if storage == Storage::BF16 { 2 } else { 4 };
    let each = lengths.iter().zip(storage);
    each.map(|(length, storage)| length * size(storage)).collect()
}

fn params([of, to]: [Storage; 2]) -> Vec<Param> {
    let input = |name| Param::new(format!("const {} *", of.ctype()), name);
    vec![
        input("left"),
        input("right"),
        Param::new(format!("{} *", to.ctype()), "out"),
    ]
}

fn numbers<const N: usize>(text: &str) -> Result<[usize; N], Error> {
    let list: Vec<usize> = text.split('x').map(str::parse).collect::<Result<_, _>>()?;
    list.try_into()
        .map_err(|_| format!("{text}: expected {N} numbers").into())
}
