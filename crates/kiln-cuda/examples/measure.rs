//! What the runtime costs and the device gives: launches, copies, products, compilation.
//!
//! ```text
//! cargo run --release -p kiln-cuda --example measure [-- products | launches]
//! ```
//!
//! Times of the device come from its events, the median of several; times of the host are wall-clock.

use std::error::Error;
use std::num::NonZero;
use std::sync::Arc;
use std::time::Instant;

use kiln_cuda::build::{Compiler, Source, Store};
use kiln_cuda::libraries::{CublasLt, Driver, Nvrtc};
use kiln_cuda::products::{Compute, Epilogue, Multiplier, Number, Product, ProductArguments, SearchLimits};
use kiln_cuda::runtime::{
    Arguments, Device, GraphBuilder, Kernel, Launch, Module, Parcel, Pinned, Storage, Stream,
};
use kiln_cuda::{Report, Search};

type Answer<T> = Result<T, Box<dyn Error>>;

/// A kernel that costs next to nothing, so that what remains is the launch.
const EMPTY: &str = "extern \"C\" __global__ void empty(float* x) { if (x == nullptr) *x = 1; }";

fn main() -> Answer<()> {
    let search = Search::from_env();
    println!("{}", Report::collect(&search));
    let device = Device::open(&Driver::open(&search)?, 0)?;
    let nvrtc = Nvrtc::open(&search)?;
    let capability = device.description().capability;
    let stream = device.stream()?;
    let part = std::env::args().nth(1);
    if part.as_deref() == Some("products") {
        return products(&device, &stream, CublasLt::open(&search)?);
    }
    if part.is_none() {
        compilation(&nvrtc, capability)?;
    }
    let compiler = Compiler::new(nvrtc, capability, Store::disabled())?;
    let cubin = compiler.compile(&[source("empty", EMPTY)])?.remove(0);
    let empty = Module::load(&device, "empty", &cubin.image)?.kernel("empty")?;
    launches(&device, &stream, &empty)?;
    if part.as_deref() == Some("launches") {
        return Ok(());
    }
    copies(&device, &stream)?;
    products(&device, &stream, CublasLt::open(&search)?)
}

fn source(name: &str, text: &str) -> Source {
    Source {
        name: name.to_owned(),
        text: text.to_owned(),
    }
}

/// The middle one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Median of `rounds` measurements in microseconds.
fn micros(rounds: usize, mut measure: impl FnMut() -> Answer<f64>) -> Answer<f64> {
    measure()?;
    Ok(median((0..rounds).map(|_| measure()).collect::<Answer<_>>()?))
}

/// Microseconds of the device for what `work` queues.
fn on_device(stream: &Stream, work: impl FnOnce() -> Answer<()>) -> Answer<f64> {
    let start = stream.record_time()?;
    work()?;
    let end = stream.record_time()?;
    Ok(f64::from(end.milliseconds_since(&start)?) * 1000.0)
}

fn compilation(nvrtc: &Nvrtc, capability: (u32, u32)) -> Answer<()> {
    let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled())?;
    let kernel = |index: usize| {
        let text = format!(
            "extern \"C\" __global__ void k{index}(float4* y, const float4* x, unsigned n) {{\n\
             unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n\
             if (i >= n) return;\n\
             float4 v = x[i];\n\
             v.x = tanhf(v.x) + {index}; v.y = expf(v.y); v.z *= v.w;\n\
             y[i] = v;\n}}"
        );
        source(&format!("k{index}"), &text)
    };
    compiler.compile(&[kernel(1000)])?;
    let start = Instant::now();
    let cubins = compiler.compile(&[kernel(1001)])?;
    println!(
        "NVRTC: one pointwise kernel {:.1} ms, {} bytes",
        millis(start),
        cubins[0].image.len()
    );
    let text = |from: usize, count: usize| {
        let texts: Vec<String> = (from..from + count).map(|index| kernel(index).text).collect();
        source("several", &texts.join("\n"))
    };
    for (threads, together) in [(1, 1), (4, 1), (16, 1), (16, 4), (16, 8), (16, 32), (1, 128)] {
        let Some(count) = NonZero::new(threads) else {
            continue;
        };
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled())?.with_threads(count);
        let sources: Vec<Source> = (0..128)
            .step_by(together)
            .map(|from| text(from, together))
            .collect();
        let start = Instant::now();
        compiler.compile(&sources)?;
        println!(
            "NVRTC: 128 of them, {together} a program, {threads} threads: {:.0} ms",
            millis(start)
        );
    }
    Ok(())
}

fn millis(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1000.0
}

fn launches(device: &Device, stream: &Stream, empty: &Kernel) -> Answer<()> {
    let x = Arc::new(Storage::allocate(stream, 1024)?);
    let launch = Launch {
        kernel: empty.clone(),
        grid: [132, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        arguments: Arguments::new().memory(&x, 0),
    };
    const CHAIN: u32 = 500;
    // SAFETY, here and below: the kernel writes nothing.
    let queue = || -> Answer<()> {
        (0..CHAIN).try_for_each(|_| unsafe { stream.launch(&launch) })?;
        Ok(())
    };
    let each = micros(11, || on_device(stream, queue))? / f64::from(CHAIN);
    let host = micros(11, || {
        stream.synchronize()?;
        let start = Instant::now();
        queue()?;
        Ok(millis(start) * 1000.0)
    })? / f64::from(CHAIN);
    println!("stream: {each:.2} us of the device a launch, {host:.2} us of the host");
    for nodes in [100, 800] {
        let mut graph = GraphBuilder::new(device, "chain")?;
        let mut last = Vec::new();
        for _ in 0..nodes {
            last = vec![unsafe { graph.kernel(&last, &launch) }?];
        }
        let start = Instant::now();
        let mut step = graph.instantiate(stream)?;
        stream.synchronize()?;
        let made = millis(start);
        let device_time = micros(21, || on_device(stream, || Ok(step.launch()?)))?;
        let mut scalars = Parcel::new(stream, 256)?;
        let host = micros(51, || {
            stream.synchronize()?;
            let start = Instant::now();
            scalars.send(stream, 256, |block| block.fill(0))?;
            step.launch()?;
            Ok(millis(start) * 1000.0)
        })?;
        println!(
            "graph of {nodes} kernels in a row: {:.2} us of the device a node, {host:.1} us of the host with \
             scalars, instantiated in {made:.1} ms",
            device_time / f64::from(nodes)
        );
    }
    calls(device, stream, &launch)
}

/// The host's time for a call of a step of 500 kernels, four calls ahead of the device, including sending
/// scalars, copying a result back, and allocating and freeing its memory.
fn calls(device: &Device, stream: &Stream, launch: &Launch) -> Answer<()> {
    let mut graph = GraphBuilder::new(device, "step")?;
    let mut last = Vec::new();
    for _ in 0..500 {
        // SAFETY: the kernel touches nothing.
        last = vec![unsafe { graph.kernel(&last, launch) }?];
    }
    let mut step = graph.instantiate(stream)?;
    let mut parcel = Parcel::new(stream, 1 << 17)?;
    let slot = Storage::allocate(stream, 256)?;
    let kept = Arc::new(Storage::allocate(stream, 256)?);
    for (sent, copied, allocated) in [
        (0, false, false),
        (256, false, false),
        (1 << 17, false, false),
        (0, true, false),
        (0, false, true),
        (256, true, false),
        (256, true, true),
    ] {
        let host = micros(15, || {
            stream.synchronize()?;
            let start = Instant::now();
            for _ in 0..4 {
                parcel.send(stream, sent, |block| block.fill(1))?;
                let result = match allocated {
                    true => Arc::new(Storage::allocate(stream, 256)?),
                    false => kept.clone(),
                };
                step.launch()?;
                if copied {
                    stream.copy(&slot, 0..256, &result, 0)?;
                }
            }
            Ok(millis(start) * 1000.0 / 4.0)
        })?;
        println!(
            "a call of 500 kernels: {host:.1} us of the host, {sent} bytes sent, result copied: {copied}, allocated: {allocated}"
        );
    }
    Ok(())
}

fn copies(device: &Device, stream: &Stream) -> Answer<()> {
    let bytes = 1 << 30;
    let (from, to) = (
        Storage::allocate(stream, bytes)?,
        Storage::allocate(stream, bytes)?,
    );
    let mut host = Pinned::allocate(device, bytes)?;
    let rate = |micros: f64| bytes as f64 / micros / 1000.0;
    let inside = micros(7, || {
        on_device(stream, || Ok(stream.copy(&from, 0..bytes, &to, 0)?))
    })?;
    let up = micros(7, || {
        on_device(stream, || Ok(stream.upload(&host, 0..bytes, &from, 0)?))
    })?;
    let down = micros(7, || {
        on_device(stream, || Ok(stream.download(&from, 0..bytes, &mut host, 0)?))
    })?;
    println!(
        "copies of 1 GiB: inside {:.0} GB/s read and written, to the device {:.1} GB/s, from it {:.1} GB/s",
        2.0 * rate(inside),
        rate(up),
        rate(down)
    );
    let allocate = micros(51, || {
        let start = Instant::now();
        drop(Storage::allocate(stream, 64 << 20)?);
        Ok(millis(start) * 1000.0)
    })?;
    println!("allocating and freeing 64 MiB of the pool: {allocate:.1} us of the host");
    Ok(())
}

fn products(device: &Device, stream: &Stream, library: CublasLt) -> Answer<()> {
    let multiplier = Multiplier::new(device, library)?;
    let square = |number| Product::dense(8192, 8192, 8192, number);
    // bert-base, 32 sequences of 128 tokens: attention's projections and scores, the feed-forward layers and
    // their gradients, the vocabulary.
    let tokens = 32 * 128;
    let linear = |n, k| Product::dense(tokens, n, k, Number::Bf16).with_transposed_right();
    let weights = |vocabulary: u64| {
        Product::dense(vocabulary, 768, tokens, Number::Bf16)
            .with_transposed_left()
            .with_result(Number::F32)
    };
    let shapes = [
        square(Number::Bf16),
        square(Number::F16),
        square(Number::Bf16).with_transposed_right(),
        square(Number::F32).with_compute(Compute::Tf32),
        Product::dense(4096, 4096, 4096, Number::F32),
        Product::dense(4096, 4096, 4096, Number::F64),
        linear(2304, 768).with_epilogue(Epilogue::Bias),
        linear(768, 768).with_epilogue(Epilogue::Bias),
        linear(3072, 768).with_epilogue(Epilogue::BiasTanhGelu),
        linear(768, 3072).with_epilogue(Epilogue::Bias),
        Product::dense(tokens, 768, 3072, Number::Bf16),
        Product::dense(3072, 768, tokens, Number::Bf16)
            .with_transposed_left()
            .with_result(Number::F32),
        Product::dense(768, 768, tokens, Number::Bf16)
            .with_transposed_left()
            .with_result(Number::F32),
        Product::dense(128, 128, 64, Number::Bf16)
            .with_batch(32 * 12)
            .with_transposed_right(),
        Product::dense(128, 64, 128, Number::Bf16).with_batch(32 * 12),
        Product::dense(3072, 768, tokens, Number::Bf16)
            .with_transposed_left()
            .with_result(Number::F32)
            .with_epilogue(Epilogue::LeftSums),
        Product::dense(3072, 768, tokens, Number::Bf16)
            .with_transposed_left()
            .with_epilogue(Epilogue::LeftSums),
        // A vocabulary that tensor cores do not take, and one padded for them: logits, and the gradients.
        linear(30_522, 768),
        linear(30_528, 768),
        Product::dense(tokens, 768, 30_522, Number::Bf16),
        Product::dense(tokens, 768, 30_528, Number::Bf16),
        weights(30_522),
        weights(30_528),
        linear(3072, 768)
            .with_compute(Compute::F32)
            .with_result(Number::F32),
        Product::dense(tokens, 3072, 768, Number::F32)
            .with_transposed_right()
            .with_compute(Compute::Tf32),
    ];
    println!(
        "products: us of the first proposal, the chosen, the chosen in a graph; TFLOP/s; timed; search ms"
    );
    for product in shapes {
        let start = Instant::now();
        let choice = multiplier.search(stream, &product, SearchLimits::default())?;
        let searched = millis(start);
        let captured = in_graph(device, stream, &multiplier, &product, &choice)?;
        println!(
            "{:9.1} {:9.1} {captured:9.1}  {:6.1} {:3} {searched:6.0}  {product}",
            choice.first_microseconds,
            choice.microseconds,
            product.flop() / captured / 1e6,
            choice.timed,
        );
    }
    Ok(())
}

/// Microseconds of one of twenty captured runs.
fn in_graph(
    device: &Device,
    stream: &Stream,
    multiplier: &Multiplier,
    product: &Product,
    choice: &kiln_cuda::products::Choice,
) -> Answer<f64> {
    const RUNS: u32 = 20;
    let noise: Vec<u8> = (0..1 << 16)
        .map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0xbf)
        .collect();
    let filled = |bytes: usize| -> Answer<Arc<Storage>> {
        let storage = Arc::new(Storage::allocate(stream, bytes)?);
        for start in (0..bytes).step_by(noise.len()) {
            stream.write(&noise[..noise.len().min(bytes - start)], &storage, start)?;
        }
        Ok(storage)
    };
    let (left, right) = (filled(product.left_bytes())?, filled(product.right_bytes())?);
    let (result, vector) = (filled(product.result_bytes())?, filled(product.vector_bytes())?);
    let mut prepared = multiplier.prepare(product, choice)?;
    let workspace = Arc::new(Storage::allocate(stream, prepared.workspace_bytes())?);
    let arguments = ProductArguments {
        vector: product.epilogue.has_vector().then_some((&vector, 0)),
        workspace: Some((&workspace, 0)),
        ..ProductArguments::new((&left, 0), (&right, 0), (&result, 0))
    };
    let mut graph = GraphBuilder::new(device, "product")?;
    graph.capture(&[], &arguments.storages(), |stream| {
        (0..RUNS).try_for_each(|_| prepared.run(stream, &arguments))
    })?;
    let mut step = graph.instantiate(stream)?;
    let time = micros(5, || on_device(stream, || Ok(step.launch()?)))?;
    Ok(time / f64::from(RUNS))
}
