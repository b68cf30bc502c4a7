//! The runtime on a GPU: memory, order, launches, graphs. Without a GPU these tests say so and pass.

mod common;

use std::sync::Arc;

use common::{bytes, gpu, numbers};
use kiln_cuda::CudaError;
use kiln_cuda::build::{CacheFolder, Compiler, code_store};
use kiln_cuda::products::{Number, Product, ProductArguments, SearchLimits};
use kiln_cuda::runtime::{Arguments, GraphBuilder, Kernel, Launch, Parcel, Pinned, Storage, Stream};

/// `y[i] = a * x[i] + b` after `cycles` cycles of waiting.
const AFFINE: &str = r#"
extern "C" __global__
void affine(float* y, const float* x, float a, float b, unsigned n, unsigned long long cycles)
{
    long long start = clock64();
    while (clock64() - start < (long long)cycles) {}
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + b;
}
"#;

/// Cycles that are longer than anything the host does meanwhile: some 50 ms.
const LONG: u64 = 100_000_000;

struct Affine<'a> {
    y: &'a Arc<Storage>,
    x: &'a Arc<Storage>,
    a: f32,
    b: f32,
    cycles: u64,
}

impl Affine<'_> {
    fn launch(&self, kernel: &Kernel, count: u32) -> Launch {
        Launch {
            kernel: kernel.clone(),
            grid: [count.div_ceil(256), 1, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
            arguments: Arguments::new()
                .memory(self.y, 0)
                .memory(self.x, 0)
                .f32(self.a)
                .f32(self.b)
                .u32(count)
                .u64(self.cycles),
        }
    }
}

fn storage(stream: &Stream, count: u32) -> Arc<Storage> {
    Arc::new(Storage::allocate(stream, count as usize * 4).unwrap())
}

fn read(stream: &Stream, storage: &Storage) -> Vec<f32> {
    let mut raw = vec![0; storage.bytes()];
    stream.read(storage, 0, &mut raw).unwrap();
    numbers(&raw)
}

fn counting(count: u32) -> Vec<f32> {
    (0..count).map(|i| i as f32).collect()
}

#[test]
fn memory_goes_to_the_device_and_back() {
    let Some(gpu) = gpu() else { return };
    let before = gpu.device.memory().unwrap();
    let data: Vec<u8> = (0..1 << 20)
        .map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let (one, two) = (
        Storage::allocate(&gpu.stream, data.len()).unwrap(),
        Storage::allocate(&gpu.stream, data.len()).unwrap(),
    );
    assert_eq!(one.address() % 256, 0);
    let sizes = gpu.device.memory().unwrap();
    assert_eq!(sizes.used - before.used, 2 * data.len());
    assert!(sizes.free < sizes.total && sizes.pool >= sizes.used, "{sizes}");
    let mut host = Pinned::allocate(&gpu.device, data.len()).unwrap();
    host.write().unwrap().copy_from_slice(&data);
    gpu.stream.upload(&host, 0..data.len(), &one, 0).unwrap();
    gpu.stream.fill(&two, 0..data.len(), 0xcd).unwrap();
    gpu.stream.copy(&one, 100..data.len() - 7, &two, 3).unwrap();
    let mut back = Pinned::allocate(&gpu.device, data.len()).unwrap();
    gpu.stream.download(&two, 0..data.len(), &mut back, 0).unwrap();
    let mut expected = vec![0xcd; data.len()];
    expected[3..data.len() - 104].copy_from_slice(&data[100..data.len() - 7]);
    assert!(back.read().unwrap() == expected);
    drop((one, two));
    gpu.device.synchronize().unwrap();
    assert_eq!(gpu.device.memory().unwrap().used, before.used);
}

#[test]
fn memory_that_is_used_up_leaves_everything_as_it_was() {
    let Some(gpu) = gpu() else { return };
    let kept = storage(&gpu.stream, 1024);
    gpu.stream.write(&bytes(&counting(1024)), &kept, 0).unwrap();
    let total = gpu.device.description().memory;
    let error = Storage::allocate(&gpu.stream, total + (1 << 30)).unwrap_err();
    println!("{error}");
    let CudaError::OutOfMemory { asked, sizes, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(asked, total + (1 << 30));
    assert!(
        sizes.total > 0 && sizes.free <= sizes.total && sizes.used >= 4096,
        "{sizes}"
    );
    // The failed attempt left nothing in the pool.
    assert!(sizes.pool <= 1 << 30 && sizes.free > sizes.pool, "{sizes}");
    assert_eq!(read(&gpu.stream, &kept), counting(1024));
    // What a large storage leaves behind in the pool serves another size.
    let large = sizes.free / 2;
    for bytes in [large, large + large / 2] {
        drop(Storage::allocate(&gpu.stream, bytes).unwrap());
    }
}

#[test]
fn work_is_queued_and_a_read_waits() {
    let Some(gpu) = gpu() else { return };
    let kernel = gpu.kernel("affine", AFFINE);
    let (x, y) = (storage(&gpu.stream, 1000), storage(&gpu.stream, 1000));
    gpu.stream.write(&bytes(&counting(1000)), &x, 0).unwrap();
    let affine = Affine {
        y: &y,
        x: &x,
        a: 2.0,
        b: 1.0,
        cycles: LONG,
    };
    // SAFETY: the kernel touches 1000 elements of each storage.
    unsafe { gpu.stream.launch(&affine.launch(&kernel, 1000)) }.unwrap();
    let done = gpu.stream.record().unwrap();
    assert!(!done.has_happened().unwrap());
    let expected: Vec<f32> = counting(1000).iter().map(|x| 2.0 * x + 1.0).collect();
    assert_eq!(read(&gpu.stream, &y), expected);
    assert!(done.has_happened().unwrap());
    let usage = kernel.usage();
    assert!(
        usage.registers > 0 && usage.local_bytes == 0 && usage.block_threads == 1024,
        "{usage:?}"
    );
}

#[test]
fn uses_on_several_streams_are_ordered_by_the_storage() {
    let Some(gpu) = gpu() else { return };
    let kernel = gpu.kernel("affine", AFFINE);
    let streams = [
        gpu.device.stream().unwrap(),
        gpu.device.stream().unwrap(),
        gpu.stream.clone(),
    ];
    let (x, y) = (storage(&gpu.stream, 1000), storage(&gpu.stream, 1000));
    gpu.stream.write(&bytes(&counting(1000)), &x, 0).unwrap();
    for turn in 0..9 {
        let (from, to) = if turn % 2 == 0 { (&x, &y) } else { (&y, &x) };
        let affine = Affine {
            y: to,
            x: from,
            a: 1.0,
            b: 1.0,
            cycles: LONG / 20,
        };
        // SAFETY: the kernel touches 1000 elements of each storage.
        unsafe { streams[turn % 3].launch(&affine.launch(&kernel, 1000)) }.unwrap();
    }
    let expected: Vec<f32> = counting(1000).iter().map(|x| x + 9.0).collect();
    assert_eq!(read(&streams[1], &y), expected);
}

#[test]
fn memory_that_is_dropped_in_use_is_not_given_to_others_before() {
    let Some(gpu) = gpu() else { return };
    let kernel = gpu.kernel("affine", AFFINE);
    let other = gpu.device.stream().unwrap();
    let x = storage(&gpu.stream, 1 << 20);
    let result = storage(&gpu.stream, 1 << 20);
    let y = storage(&gpu.stream, 1 << 20);
    gpu.stream.write(&bytes(&counting(1 << 20)), &x, 0).unwrap();
    let slow = Affine {
        y: &y,
        x: &x,
        a: 1.0,
        b: 1.0,
        cycles: LONG / 10,
    };
    let last = Affine {
        y: &result,
        x: &y,
        a: 1.0,
        b: 0.0,
        cycles: 0,
    };
    // SAFETY: the kernels touch 2^20 elements of each storage.
    unsafe { gpu.stream.launch(&slow.launch(&kernel, 1 << 20)) }.unwrap();
    // SAFETY: as above.
    unsafe { gpu.stream.launch(&last.launch(&kernel, 1 << 20)) }.unwrap();
    drop(y);
    let thieves: Vec<Storage> = (0..4)
        .map(|_| Storage::allocate(&other, 4 << 20).unwrap())
        .collect();
    for thief in &thieves {
        other.fill(thief, 0..4 << 20, 0xff).unwrap();
    }
    other.synchronize().unwrap();
    let found = read(&gpu.stream, &result);
    assert!(
        found
            .iter()
            .zip(counting(1 << 20))
            .all(|(found, x)| *found == x + 1.0)
    );
    for thief in &thieves {
        assert!(read(&other, thief).iter().all(|x| x.to_bits() == u32::MAX));
    }
}

#[test]
fn arguments_that_do_not_fit_a_kernel_are_refused() {
    let Some(gpu) = gpu() else { return };
    let kernel = gpu.kernel("affine", AFFINE);
    let x = storage(&gpu.stream, 16);
    let launch = Launch {
        arguments: Arguments::new()
            .memory(&x, 0)
            .memory(&x, 0)
            .f32(1.0)
            .f32(1.0)
            .u64(16)
            .u64(0),
        ..Affine {
            y: &x,
            x: &x,
            a: 0.0,
            b: 0.0,
            cycles: 0,
        }
        .launch(&kernel, 16)
    };
    // SAFETY: the launch is refused.
    let error = unsafe { gpu.stream.launch(&launch) }.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("parameters have [8, 8, 4, 4, 4, 8] bytes, the arguments [8, 8, 4, 4, 8, 8]"),
        "{error}"
    );
}

#[test]
fn a_block_may_have_all_shared_memory_of_a_multiprocessor() {
    let Some(gpu) = gpu() else { return };
    let text = r#"
extern "C" __global__ void turn(float* x, unsigned n)
{
    extern __shared__ float row[];
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) x[i] = row[n - 1 - i];
}
"#;
    let kernel = gpu.kernel("turn", text);
    let shared = gpu.device.description().shared_bytes;
    let count = shared / 4;
    let x = storage(&gpu.stream, count);
    gpu.stream.write(&bytes(&counting(count)), &x, 0).unwrap();
    let launch = Launch {
        kernel,
        grid: [1, 1, 1],
        block: [1024, 1, 1],
        shared_bytes: count * 4,
        arguments: Arguments::new().memory(&x, 0).u32(count),
    };
    // SAFETY: the kernel touches `count` elements of `x` and of its shared memory.
    unsafe { gpu.stream.launch(&launch) }.unwrap();
    let mut expected = counting(count);
    expected.reverse();
    assert_eq!(read(&gpu.stream, &x), expected);
}

#[test]
fn a_whole_step_runs_as_one_graph_whose_numbers_change() {
    let Some(gpu) = gpu() else { return };
    let stream = &gpu.stream;
    let multiplier = gpu.multiplier();
    let text = r#"
struct Scalars { float rate; unsigned step; };
extern "C" __global__ void update(float* weights, const float* product, const Scalars* s, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) weights[i] += s->rate * product[i] + (float)s->step;
}
"#;
    let update = gpu.kernel("update", text);
    let (n, count) = (64_u32, 64 * 64_u32);
    // input * identity lands in `product`, which updates `weights`; `backup` has the weights from before.
    let (input, identity, product) = (
        storage(stream, count),
        storage(stream, count),
        storage(stream, count),
    );
    let (weights, backup, zeroed) = (
        storage(stream, count),
        storage(stream, count),
        storage(stream, count),
    );
    let mut unit = vec![0.0; count as usize];
    (0..n).for_each(|i| unit[(i * n + i) as usize] = 1.0);
    stream.write(&bytes(&unit), &identity, 0).unwrap();
    stream.fill(&weights, 0..weights.bytes(), 0).unwrap();
    let mut scalars = Parcel::new(stream, 8).unwrap();
    let mut fresh_input = Parcel::new(stream, input.bytes()).unwrap();

    let dense = Product::dense(n.into(), n.into(), n.into(), Number::F32);
    let choice = multiplier
        .search(
            stream,
            &dense,
            SearchLimits {
                algorithms: 4,
                ..SearchLimits::default()
            },
        )
        .unwrap();
    let mut prepared = multiplier.prepare(&dense, &choice).unwrap();
    let workspace = Arc::new(Storage::allocate(stream, prepared.workspace_bytes()).unwrap());
    let arguments = ProductArguments {
        workspace: Some((&workspace, 0)),
        ..ProductArguments::new((&input, 0), (&identity, 0), (&product, 0))
    };

    let mut graph = GraphBuilder::new(&gpu.device, "train_step").unwrap();
    let multiplied = graph
        .capture(&[], &arguments.storages(), |stream| {
            prepared.run(stream, &arguments)
        })
        .unwrap();
    let saved = graph.copy(&[], &weights, 0..weights.bytes(), &backup, 0).unwrap();
    let zeros = graph.fill(&[saved], &zeroed, 0..zeroed.bytes(), 0).unwrap();
    let ready = graph.join(&[multiplied, saved, zeros]).unwrap();
    let launch = Launch {
        kernel: update,
        grid: [count.div_ceil(256), 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        arguments: Arguments::new()
            .memory(&weights, 0)
            .memory(&product, 0)
            .memory(scalars.storage(), 0)
            .u32(count),
    };
    // SAFETY: the kernel touches `count` elements of weights and product, and the scalars, after `ready`.
    unsafe { graph.kernel(&[ready], &launch) }.unwrap();
    let mut step = graph.instantiate(stream).unwrap();
    // Only the graph keeps these now.
    drop((launch, workspace, identity));

    let mut expected = vec![0.0_f32; count as usize];
    let mut before = expected.clone();
    for call in 0..50_u32 {
        let fresh: Vec<f32> = (0..count).map(|i| ((i * 7 + call * 13) % 64) as f32).collect();
        // A rate that f32 and the products have exactly.
        let rate = 0.25 * (call % 4) as f32;
        let arrives = |block: &mut [u8]| block.copy_from_slice(&bytes(&fresh));
        fresh_input.send(stream, input.bytes(), arrives).unwrap();
        stream
            .copy(fresh_input.storage(), 0..input.bytes(), &input, 0)
            .unwrap();
        let block = [rate.to_ne_bytes(), call.to_ne_bytes()].concat();
        scalars.send(stream, 8, |to| to.copy_from_slice(&block)).unwrap();
        step.launch().unwrap();
        before.clone_from(&expected);
        for (weight, x) in expected.iter_mut().zip(&fresh) {
            *weight += rate * x + call as f32;
        }
    }
    assert_eq!(read(stream, &weights), expected);
    assert_eq!(read(stream, &backup), before);
    assert!(step.nodes() >= 5, "{}", step.nodes());
    // A launch may be under way when the graph goes.
    step.launch().unwrap();
    drop(step);
    gpu.device.synchronize().unwrap();
}

#[test]
fn waiting_inside_a_capture_is_an_error_and_the_device_goes_on() {
    let Some(gpu) = gpu() else { return };
    let x = storage(&gpu.stream, 16);
    let mut graph = GraphBuilder::new(&gpu.device, "step").unwrap();
    let error = graph.capture(&[], &[&x], Stream::synchronize).unwrap_err();
    println!("{error}");
    assert!(matches!(error, CudaError::Driver { .. }), "{error}");
    gpu.stream.write(&bytes(&counting(16)), &x, 0).unwrap();
    assert_eq!(read(&gpu.stream, &x), counting(16));
}

#[test]
fn machine_code_of_the_cache_runs() {
    let Some(gpu) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let source = kiln_cuda::build::Source {
        name: "affine".into(),
        text: AFFINE.into(),
    };
    for cached in [false, true] {
        let nvrtc = common::nvrtc().unwrap();
        let cache = code_store(&CacheFolder::at(folder.path(), 1 << 30));
        let compiler = Compiler::new(nvrtc, gpu.device.description().capability, cache).unwrap();
        let cubin = compiler.compile(std::slice::from_ref(&source)).unwrap().remove(0);
        assert_eq!(cubin.cached, cached);
        let module = kiln_cuda::runtime::Module::load(&gpu.device, "affine", &cubin.image).unwrap();
        let (x, y) = (storage(&gpu.stream, 100), storage(&gpu.stream, 100));
        gpu.stream.write(&bytes(&counting(100)), &x, 0).unwrap();
        let affine = Affine {
            y: &y,
            x: &x,
            a: 3.0,
            b: 0.0,
            cycles: 0,
        };
        // SAFETY: the kernel touches 100 elements of each storage.
        unsafe {
            gpu.stream
                .launch(&affine.launch(&module.kernel("affine").unwrap(), 100))
        }
        .unwrap();
        assert_eq!(read(&gpu.stream, &y)[99], 297.0);
    }
}
