//! GFLOP/s of generated matrix products.
//!
//! `cargo run --release -p kiln-compiler --example gemm_bench [threads] [MxNxK[tn]...]`
//!
//! Without shapes, those of the models that Kiln's benchmarks train. A trailing `t` or `n` for each operand says whether it is
//! read transposed: `1024x256x688nt` multiplies by the transpose of a `256 x 688` matrix.

use std::time::Instant;

use kiln_compiler::kernels::gemm::{self, Epilogue, GemmSpec, Operand};
use kiln_compiler::kernels::{Param, standalone};
use kiln_cpu::{AlignedBuffer, BuildOptions, Library, NoHooks, StepArguments, ThreadPool, Toolchain};

const SHAPES: &[&str] = &[
    // Square; a 14 x 32 kernel reaches 147 GFLOP/s on one core of the reference machine.
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
    // resnet: 1x1 convolutions over channels-last images.
    "25088x64x256nn",
    "6272x512x128nn",
    "1568x256x1024nn",
    // Small and skinny.
    "128x10x1024nn",
    "1x4096x1024nn",
    "1x4096x1024nt",
    "8x1024x1024nt",
    "64x64x64nn",
];

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let threads: usize = arguments.next().map_or(Ok(2), |text| text.parse())?;
    let shapes: Vec<String> = arguments.collect();
    let toolchain = Toolchain::detect()?;
    let pool = ThreadPool::new(threads);
    println!("{} on {}, {threads} threads", toolchain.version(), toolchain.isa());
    if shapes.is_empty() {
        SHAPES.iter().try_for_each(|shape| bench(shape, &toolchain, &pool))
    } else {
        shapes.iter().try_for_each(|shape| bench(shape, &toolchain, &pool))
    }
}

fn bench(shape: &str, toolchain: &Toolchain, pool: &ThreadPool) -> Result<(), Error> {
    let (sizes, order) = shape.split_at(shape.find(['n', 't']).unwrap_or(shape.len()));
    let sizes: Vec<usize> = sizes.split('x').map(str::parse).collect::<Result<_, _>>()?;
    let [m, n, k] = sizes[..] else { return Err(format!("{shape}: expected MxNxK").into()) };
    let transposed = |index| order.chars().nth(index) == Some('t');
    let (a_free, a_depth) = if transposed(0) { (1, m as i64) } else { (k as i64, 1) };
    let (b_free, b_depth) = if transposed(1) { (k as i64, 1) } else { (1, n as i64) };
    let spec = GemmSpec {
        name: "gemm".into(),
        comment: shape.into(),
        batch: 1,
        m,
        n,
        k,
        a: Operand::strided("a", &[], a_free, a_depth),
        b: Operand::strided("b", &[], b_free, b_depth),
        epilogue: Epilogue::store("out", &[], n as i64, 1),
        params: vec![
            Param::new("const float *", "a"),
            Param::new("const float *", "b"),
            Param::new("float *", "out"),
        ],
        threads: pool.threads(),
    };
    let kernel = gemm::emit(spec, toolchain.isa());
    let files = standalone::step(std::slice::from_ref(&kernel), toolchain.isa());
    let built = toolchain.build(&files, &BuildOptions::default())?;
    let step = Library::load(built.path())?.step();
    if std::env::var_os("KEEP").is_some() {
        println!("sources in {}", built.keep().display());
    }

    let fill = |count: usize| -> Vec<f32> { (0..count).map(|i| ((i * 7919 + 13) % 1000) as f32 * 1e-3 - 0.5).collect() };
    let (a, b, mut c) = (fill(m * k), fill(k * n), vec![0f32; m * n]);
    let mut arena = AlignedBuffer::zeroed(kernel.workspace_bytes)?;
    let flops = 2.0 * (m * n * k) as f64;
    let repeats = (2e9 / flops).clamp(1.0, 1000.0) as usize;
    let mut times = Vec::new();
    for _ in 0..15 {
        let start = Instant::now();
        for _ in 0..repeats {
            let arguments = StepArguments {
                inputs: &[a.as_ptr().cast(), b.as_ptr().cast()],
                outputs: &[c.as_mut_ptr().cast()],
                arena: &mut arena,
                scalars: &[],
            };
            // SAFETY: three buffers of the sizes the kernel was generated for.
            unsafe { step.run(pool, arguments, &NoHooks) }?;
        }
        times.push(start.elapsed().as_secs_f64() / repeats as f64);
    }
    times.sort_by(f64::total_cmp);
    let (median, best) = (times[times.len() / 2], times[0]);
    println!(
        "{shape:20} {:8.1} GFLOP/s (best {:.1}), {:9.1} µs, {:5.1} GB/s, workspace {} KiB",
        flops / median * 1e-9,
        flops / best * 1e-9,
        median * 1e6,
        4.0 * (m * k + k * n + m * n) as f64 / median * 1e-9,
        kernel.workspace_bytes >> 10,
    );
    Ok(())
}
