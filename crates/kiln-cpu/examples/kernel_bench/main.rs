//! Speed of generated matrix products and convolutions.
//!
//! `cargo run --release -p kiln-cpu --example kernel_bench [threads] [shape...]`
//!
//! Without shapes, those of the models that Kiln's benchmarks train. Shapes are written as
//!
//! - `1024x688x256nt`: rows, columns, depth; `t` or `n` for each operand says whether it is read transposed.
//!   `32*` in front makes it a batch.
//! - `conv:8x64x56-64k3s1g1`: images, channels, size, output channels, kernel, stride, groups; forward, both
//!   gradients. Images are channels-last; `first:` instead of `conv:` makes them channels-first.
//!
//! Each line gives the median over repetitions in wall time, and the best. With one thread the rate by
//! processor time is printed too, which other work on the machine does not disturb as much.

use std::fs;
use std::time::Instant;

use kiln_cpu::kernels::conv::{self, ConvSpec, Geometry, Image, PixelEpilogue, WeightGradSpec};
use kiln_cpu::kernels::element::Storage;
use kiln_cpu::kernels::gemm::{self, Epilogue, GemmSpec, Operand};
use kiln_cpu::kernels::{KernelText, Param, Width, standalone};
use kiln_cpu::{AlignedBuffer, BuildOptions, Library, NoHooks, StepArguments, ThreadPool, Toolchain};

const SHAPES: &[&str] = &[
    // Square, for comparison with other libraries.
    "1024x1024x1024nn",
    // llama-tiny, 8x128 tokens: projections, feed-forward, logits, and their gradients.
    "1024x256x256nn",
    "1024x688x256nn",
    "1024x256x688nt",
    "256x688x1024tn",
    "1024x4096x256nt",
    "1024x256x4096nn",
    // bert-minilm.
    "1024x384x384nt",
    "1024x1536x384nt",
    "384x1536x1024tn",
    // Attention of llama-tiny and bert-minilm: scores and values.
    "32*128x128x64nt",
    "32*128x64x128nn",
    "96*128x128x32nt",
    "96*128x32x128nn",
    // Small and skinny.
    "128x10x1024nn",
    "1x4096x1024nn",
    "1x4096x1024nt",
    "8x1024x1024nt",
    "64x64x64nn",
    // resnet.
    "conv:8x3x224-64k7s2g1",
    "conv:8x64x56-64k3s1g1",
    "conv:8x128x28-128k3s1g1",
    "conv:8x128x56-128k3s2g1",
    "conv:8x256x14-256k3s1g1",
    "conv:8x512x7-512k3s1g1",
    "conv:4x256x56-64k1s1g1",
    "conv:4x64x56-256k1s1g1",
    "conv:4x256x56-512k1s2g1",
    // resnext and mobilenet.
    "conv:4x128x56-128k3s1g32",
    "conv:4x512x14-512k3s1g32",
    "conv:8x96x112-96k3s2g96",
    "conv:8x144x56-144k3s1g144",
    "conv:8x960x7-960k3s1g960",
    "first:8x64x56-64k3s1g1",
    "first:8x512x7-512k3s1g1",
    "first:4x256x56-64k1s1g1",
    "first:4x256x56-512k1s2g1",
    "first:8x144x56-144k3s1g144",
];

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let threads: usize = arguments.next().map_or(Ok(2), |text| text.parse())?;
    let shapes: Vec<String> = arguments.collect();
    let bench = Bench {
        toolchain: Toolchain::detect()?,
        pool: ThreadPool::new(threads),
    };
    println!(
        "{} on {}, {threads} threads",
        bench.toolchain.version(),
        bench.toolchain.isa()
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
}

impl Bench {
    fn shape(&self, shape: &str) -> Result<(), Error> {
        match shape.split_once(':') {
            Some((layout, rest)) => self.conv(shape, rest, layout == "conv"),
            None => self.gemm(shape),
        }
    }

    fn gemm(&self, shape: &str) -> Result<(), Error> {
        let (batch, one) = shape.split_once('*').unwrap_or(("1", shape));
        let batch: usize = batch.parse()?;
        let (sizes, order) = one.split_at(one.find(['n', 't']).unwrap_or(one.len()));
        let [m, n, k] = numbers(sizes, "x")?;
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
        let spec = GemmSpec {
            name: "gemm".into(),
            comment: shape.into(),
            batch,
            m,
            n,
            k,
            a: Operand::strided("a", &all(m * k), a_free, a_depth),
            b: Operand::strided("b", &all(k * n), b_free, b_depth),
            epilogue: Epilogue::store("out", &all(m * n), n as i64, 1),
            params: params(["a", "b"]),
            threads: self.pool.threads(),
        };
        let kernel = gemm::emit(spec, self.toolchain.isa());
        self.time(
            shape,
            &kernel,
            [m * k, k * n, m * n].map(|each| each * batch),
            2.0 * (batch * m * n * k) as f64,
        )
    }

    fn conv(&self, shape: &str, rest: &str, channels_last: bool) -> Result<(), Error> {
        let text = rest.replace(['-', 'k', 's', 'g'], "x");
        let [images, channels, size, out_channels, kernel, stride, groups] = numbers(&text, "x")?;
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
            if channels_last {
                [s * s * c, s * s * c, s * c, c, 1]
            } else {
                [s * s * c, s * s, s, 1, s * s]
            }
        };
        let (input, out) = (strides(channels, size), strides(out_channels, output));
        let spec = |image, epilogue| ConvSpec {
            name: "conv".into(),
            comment: shape.into(),
            geometry,
            image,
            weight: "weight".into(),
            storage: Storage::F32,
            epilogue,
            params: params(["a", "weight"]),
            threads: self.pool.threads(),
        };
        let weight_grad = WeightGradSpec {
            name: "conv".into(),
            comment: shape.into(),
            geometry,
            input: Image::strided("a", input),
            output_grad: Image::strided("b", out),
            storage: Storage::F32,
            consume: Box::new(|width, index, value| match width {
                Width::Scalar => format!("out[{index}] = {value};"),
                Width::Vector => format!("vf_store(out + {index}, {value});"),
            }),
            params: params(["a", "b"]),
            threads: self.pool.threads(),
        };
        let isa = self.toolchain.isa();
        let x = images * channels * size * size;
        let y = images * out_channels * output * output;
        let w = geometry.weight_len();
        let flops = 2.0 * (images * output * output * w) as f64;
        let forward = conv::forward(
            spec(Image::strided("a", input), PixelEpilogue::store("out", out)),
            isa,
        );
        self.time(shape, &forward, [x, w, y], flops)?;
        let grad = conv::input_grad(
            spec(Image::strided("a", out), PixelEpilogue::store("out", input)),
            isa,
        );
        self.time("       input gradient", &grad, [y, w, x], flops)?;
        self.time(
            "       weight gradient",
            &conv::weight_grad(weight_grad, isa),
            [x, y, w],
            flops,
        )
    }

    /// Builds the kernel, runs it on two inputs and an output of these lengths, and prints its rate.
    fn time(&self, name: &str, kernel: &KernelText, lengths: [usize; 3], flops: f64) -> Result<(), Error> {
        let files = standalone::step(std::slice::from_ref(kernel), self.toolchain.isa());
        let built = self.toolchain.build(&files, &BuildOptions::default())?;
        let step = Library::load(built.path())?.step();
        let fill = |count: usize| -> Vec<f32> {
            (0..count)
                .map(|i| ((i * 7919 + 13) % 1000) as f32 * 1e-3 - 0.5)
                .collect()
        };
        let (a, b, mut out) = (fill(lengths[0]), fill(lengths[1]), vec![0f32; lengths[2]]);
        let mut arena = AlignedBuffer::zeroed(kernel.workspace_bytes)?;
        let mut run = || {
            let arguments = StepArguments {
                inputs: &[a.as_ptr().cast(), b.as_ptr().cast()],
                outputs: &[out.as_mut_ptr().cast()],
                arena: &mut arena,
                scalars: &[],
            };
            // SAFETY: three buffers of the sizes the kernel was generated for.
            unsafe { step.run(&self.pool, arguments, &NoHooks) }
        };
        run()?;
        let start = Instant::now();
        run()?;
        let once = start.elapsed().as_secs_f64();
        let repeats = (0.02 / once).clamp(1.0, 1000.0) as usize;
        let mut times = Vec::new();
        let processor = processor_time();
        for _ in 0..15 {
            let start = Instant::now();
            (0..repeats).try_for_each(|_| run())?;
            times.push(start.elapsed().as_secs_f64() / repeats as f64);
        }
        let processor = match (processor, processor_time()) {
            (Some(before), Some(after)) if self.pool.threads() == 1 => {
                format!(
                    " (processor time {:.1})",
                    flops * 15.0 * repeats as f64 / (after - before)
                )
            }
            _ => String::new(),
        };
        times.sort_by(f64::total_cmp);
        let (median, best) = (times[times.len() / 2], times[0]);
        println!(
            "{name:26} {:7.1} GFLOP/s (best {:.1}){processor}, {:9.1} µs, {:5.1} GB/s, workspace {} KiB, built in {:.2} s",
            flops / median * 1e-9,
            flops / best * 1e-9,
            median * 1e6,
            4.0 * lengths.iter().sum::<usize>() as f64 / median * 1e-9,
            kernel.workspace_bytes >> 10,
            built.elapsed.as_secs_f64(),
        );
        Ok(())
    }
}

fn params(inputs: [&str; 2]) -> Vec<Param> {
    let [a, b] = inputs.map(|name| Param::new("const float *", name));
    vec![a, b, Param::new("float *", "out")]
}

fn numbers<const N: usize>(text: &str, separator: &str) -> Result<[usize; N], Error> {
    let list: Vec<usize> = text.split(separator).map(str::parse).collect::<Result<_, _>>()?;
    list.try_into()
        .map_err(|_| format!("{text}: expected {N} numbers").into())
}

/// Nanoseconds that this thread spent on a processor, where the system says.
fn processor_time() -> Option<f64> {
    fs::read_to_string("/proc/thread-self/schedstat")
        .ok()?
        .split(' ')
        .next()?
        .parse()
        .ok()
}
