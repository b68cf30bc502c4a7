//! Whole steps on a GPU: against the interpreter, call by call and as a graph, twice with the same bits.
//! Skipped with a message where there is no GPU.

mod behind;
mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::{env, fs};

use kiln_compiler::{CompileError, Options};
use kiln_cuda::emit::product::padded::Padding;
use kiln_cuda::emit::product::warpgroups::{CAPABILITY, Warpgroups};
use kiln_cuda::execute::{CudaExecutable, Given, Gpu, NothingOutside, StepError};
use kiln_cuda::runtime::Storage;
use kiln_cuda::testing::host::Differential;
use kiln_cuda::{CudaError, CudaTarget};
use kiln_graph::testing::{Family, GraphConfig, random_graph, seeds};
use kiln_graph::{DType, Graph, HostTensor, interpret_f64};

/// The first GPU; a printed reason if there is none.
fn gpu() -> Option<Arc<Gpu>> {
    common::gpu()?;
    Some(Gpu::get(0).unwrap())
}

/// Runs of each step: call by call, the first of its graph, and two more.
const RUNS: usize = 4;

/// Runs `graph` on the GPU; none if the target does not compute one of its operations.
fn check(gpu: &Arc<Gpu>, graph: &Graph, tolerances: Option<&[f64]>) -> Result<Option<()>, String> {
    check_for(gpu, graph, tolerances, &gpu.target())
}

fn check_for(
    gpu: &Arc<Gpu>,
    graph: &Graph,
    tolerances: Option<&[f64]>,
    target: &CudaTarget,
) -> Result<Option<()>, String> {
    let executable = match CudaExecutable::new(graph, &Options::default(), target, gpu) {
        Ok(executable) => executable,
        Err(StepError::Compile(error @ CompileError::Unsupported { .. })) => {
            println!("{error}");
            return Ok(None);
        }
        Err(error) => return Err(error.to_string()),
    };
    let mut differential = Differential::new(graph);
    if let Some(tolerances) = tolerances {
        differential = differential.tolerances(tolerances);
    }
    let (tensors, scalars) = differential.given();
    let types = graph.scalars().iter().map(|&value| graph.dtype(value));
    let bits: Vec<u64> = scalars
        .iter()
        .zip(types)
        .map(|(scalar, dtype)| scalar.to_bits(dtype))
        .collect();
    let upload = |tensor: &HostTensor| gpu.upload(tensor.bytes()).unwrap();
    let states: Vec<Arc<Storage>> = tensors.iter().map(upload).collect();
    let mut first: Option<Vec<HostTensor>> = None;
    for run in 0..RUNS {
        // The state is overwritten in place: its memory stays, its elements are those of the first run.
        for (state, tensor) in states.iter().zip(tensors) {
            gpu.stream().write(tensor.bytes(), state, 0).unwrap();
        }
        let aliases = &executable.contract().aliases;
        let place = |(output, alias): (&kiln_graph::Output, &Option<u32>)| match alias {
            Some(input) => states[*input as usize].clone(),
            None => gpu.allocate(graph.ty(output.value).bytes()).unwrap(),
        };
        let outputs: Vec<Arc<Storage>> = graph.outputs.iter().zip(aliases).map(place).collect();
        executable
            .run(&states, &outputs, &bits, &NothingOutside, true)
            .map_err(|error| format!("run {run}: {error}"))?;
        let read = |(output, storage): (&kiln_graph::Output, &Arc<Storage>)| {
            let ty = graph.ty(output.value).clone();
            let mut bytes = vec![0; ty.bytes()];
            gpu.download(storage, &mut bytes).unwrap();
            HostTensor::from_bytes(ty, bytes).unwrap()
        };
        let outputs: Vec<HostTensor> = graph.outputs.iter().zip(&outputs).map(read).collect();
        differential
            .compare(&outputs)
            .map_err(|error| format!("run {run}: {error}"))?;
        match &first {
            None => first = Some(outputs),
            Some(first) => {
                for (number, (one, other)) in first.iter().zip(&outputs).enumerate() {
                    if one.bytes() != other.bytes() {
                        return Err(format!("output {number} has other bits in run {run}"));
                    }
                }
            }
        }
    }
    if executable.contract().externs.is_empty() && executable.graph_nodes().is_none() {
        return Err("the step never became a graph".into());
    }
    if executable.can_settle() {
        check_settled(gpu, &executable, (tensors, &bits), &first.unwrap_or_default())?;
    }
    Ok(Some(()))
}

/// Calls on settled arguments give the bits of `expected`: arguments that an output takes over stay on the
/// device, the others come from the host at each call.
fn check_settled(
    gpu: &Gpu,
    executable: &CudaExecutable,
    (tensors, scalars): (&[HostTensor], &[u64]),
    expected: &[HostTensor],
) -> Result<(), String> {
    let aliases: Vec<Option<usize>> = executable
        .contract()
        .aliases
        .iter()
        .map(|alias| alias.map(|input| input as usize))
        .collect();
    let stays = |(index, tensor): (usize, &HostTensor)| {
        let taken = aliases.contains(&Some(index));
        taken.then(|| gpu.upload(tensor.bytes()).unwrap())
    };
    let inputs = tensors.iter().enumerate().map(stays).collect();
    let mut settled = executable
        .settle(inputs, &aliases)
        .map_err(|error| error.to_string())?;
    for run in 0..3 {
        for (index, tensor) in tensors.iter().enumerate() {
            if let Some(storage) = settled.argument(index) {
                gpu.stream().write(tensor.bytes(), storage, 0).unwrap();
            }
        }
        let fresh = settled.fresh().to_vec();
        let given: Vec<Given<'_>> = fresh
            .iter()
            .map(|&index| Given::Host(tensors[index].bytes()))
            .collect();
        let made = executable
            .run_settled(&mut settled, &given, scalars, true)
            .map_err(|error| format!("settled run {run}: {error}"))?;
        let mut made = made.iter();
        for (number, (alias, expected)) in aliases.iter().zip(expected).enumerate() {
            let storage = match alias {
                Some(input) => settled.argument(*input),
                None => made.next(),
            };
            let mut bytes = vec![0; expected.bytes().len()];
            gpu.download(storage.unwrap(), &mut bytes).unwrap();
            if bytes != expected.bytes() {
                return Err(format!("output {number} has other bits in settled run {run}"));
            }
        }
    }
    Ok(())
}

/// Whole numbers from -32 to 31, others for each seed.
fn numbers(shape: [usize; 2], seed: usize) -> HostTensor {
    let number = |at: usize| ((at * 37 + seed * 11) % 64) as f64 - 32.0;
    HostTensor::from_floats(DType::F32, shape, (0..shape[0] * shape[1]).map(number))
}

/// State that the step does not compute in place has two buffers and two graphs: its values equal those of
/// as many runs of the interpreter.
#[test]
fn state_with_two_buffers() {
    let Some(gpu) = gpu() else { return };
    let text = "graph @mixed {
      %state = parameter 0 : f32[32,32]
      %batch = parameter 1 : f32[32,32]
      %turned = transpose %state {perm=[1,0]} : f32[32,32]
      %next = add %turned, %batch : f32[32,32]
      return %next
    }";
    let graph = Graph::parse(text).unwrap();
    let executable = CudaExecutable::new(&graph, &Options::default(), &gpu.target(), &gpu).unwrap();
    let numbers = |seed| numbers([32, 32], seed);
    let mut expected = numbers(0);
    let state = gpu.upload(expected.bytes()).unwrap();
    let mut settled = executable.settle(vec![Some(state), None], &[Some(0)]).unwrap();
    assert_eq!(settled.pairs(), [(0, 0)]);
    for call in 1..8 {
        let batch = numbers(call);
        let given = [Given::Host(batch.bytes())];
        executable.run_settled(&mut settled, &given, &[], true).unwrap();
        expected = interpret_f64(&graph, &[expected, batch.clone()], &[])
            .unwrap()
            .remove(0);
        let mut bytes = vec![0; 4096];
        gpu.download(settled.argument(0).unwrap(), &mut bytes).unwrap();
        let ty = graph.ty(graph.outputs[0].value).clone();
        let actual = HostTensor::from_bytes(ty, bytes).unwrap();
        assert_eq!(actual.to_f64s(), expected.to_f64s(), "call {call}");
    }
}

/// Large inputs are read where they are: each of several calls that are queued at once reads its own, whether
/// it was on the device or came from the host, and a batch that is also the state is read as it was.
#[test]
fn large_inputs_where_they_are() {
    let Some(gpu) = gpu() else { return };
    let text = "graph @large {
      %state = parameter 0 : f32[256,1024]
      %batch = parameter 1 : f32[256,1024]
      %next = add %state, %batch : f32[256,1024]
      %loss = reduce max %batch {axes=[0]} : f32[1024]
      return %next (alias 0), %loss
    }";
    let graph = Graph::parse(text).unwrap();
    let executable = CudaExecutable::new(&graph, &Options::default(), &gpu.target(), &gpu).unwrap();
    let numbers = |seed| numbers([256, 1024], seed);
    let mut expected = numbers(0);
    let state = gpu.upload(expected.bytes()).unwrap();
    let inputs = vec![Some(state.clone()), None];
    let mut settled = executable.settle(inputs, &[Some(0), None]).unwrap();
    let mut call = |given: Given<'_>, expected: &mut HostTensor, batch: &HostTensor| {
        let results = executable
            .run_settled(&mut settled, &[given], &[], false)
            .unwrap();
        let mut interpreted = interpret_f64(&graph, &[expected.clone(), batch.clone()], &[]).unwrap();
        let loss = interpreted.remove(1);
        *expected = interpreted.remove(0);
        (results, loss)
    };
    let batches: Vec<HostTensor> = (1..9).map(numbers).collect();
    let on_device: Vec<_> = batches
        .iter()
        .map(|batch| gpu.upload(batch.bytes()).unwrap())
        .collect();
    let mut made = Vec::new();
    for (number, (batch, on_device)) in batches.iter().zip(&on_device).enumerate() {
        let given = match number % 3 {
            2 => Given::Host(batch.bytes()),
            _ => Given::Device(on_device),
        };
        made.push(call(given, &mut expected, batch));
        if number == 4 {
            let twice = expected.clone();
            made.push(call(Given::Device(&state), &mut expected, &twice));
        }
    }
    drop(on_device);
    let read = |storage: &Storage, ty| {
        let mut bytes = vec![0; storage.bytes()];
        gpu.download(storage, &mut bytes).unwrap();
        HostTensor::from_bytes(ty, bytes).unwrap().to_f64s()
    };
    for (number, (results, loss)) in made.iter().enumerate() {
        let ty = graph.ty(graph.outputs[1].value).clone();
        assert_eq!(read(&results[0], ty), loss.to_f64s(), "call {number}");
    }
    let ty = graph.ty(graph.outputs[0].value).clone();
    assert_eq!(read(&state, ty), expected.to_f64s());
}

/// Products on copies with padded extents.
#[test]
fn padded_products() {
    let Some(gpu) = gpu() else { return };
    let text = "graph @padded {
      %a = parameter 0 : T[390,400]
      %b = parameter 1 : T[400,389]
      %c = parameter 2 : T[386,389]
      %d = parameter 3 : T[385,386]
      %x = dot_general %a, %b {a_contract=[1], b_contract=[0]} : T[390,389]
      %y = dot_general %c, %d {a_contract=[0], b_contract=[1]} : T[389,385]
      return %x, %y
    }";
    for dtype in ["bf16", "f16"] {
        let graph = Graph::parse(&text.replace("T[", &format!("{dtype}["))).unwrap();
        let target = CudaTarget {
            padding: Padding::Always,
            ..gpu.target()
        };
        check_for(&gpu, &graph, None, &target).unwrap();
    }
}

/// Kiln's own template for products, alone and with nests behind them.
#[test]
fn products_by_warpgroups() {
    let Some(gpu) = gpu() else { return };
    if gpu.target().capability != CAPABILITY {
        println!("this device has no instructions for groups of warps");
        return;
    }
    let target = CudaTarget {
        warpgroups: Warpgroups::Always,
        ..gpu.target()
    };
    for dtype in ["bf16", "f16"] {
        for graph in behind::nests(dtype)
            .into_iter()
            .chain([behind::products(dtype), behind::placed(dtype)])
        {
            let checked = check_for(&gpu, &graph, None, &target);
            assert_eq!(checked, Ok(Some(())), "{} of {dtype}", graph.name);
        }
        for joined in behind::joined(dtype) {
            let checked = check_for(&gpu, &joined.graph, joined.tolerances, &target);
            let (name, kernels) = (&joined.graph.name, joined.kernels);
            assert_eq!(checked, Ok(Some(())), "{name} of {dtype}, {kernels} products");
        }
        for behind::Summed { graph, tolerances } in [behind::sums, behind::windows, behind::windows_alone]
            .into_iter()
            .flat_map(|graphs| graphs(dtype))
        {
            let checked = check_for(&gpu, &graph, Some(&tolerances), &target);
            assert_eq!(checked, Ok(Some(())), "{} of {dtype}", graph.name);
        }
    }
}

/// Checks graphs, and how many of them the target computes.
fn check_all(gpu: &Arc<Gpu>, graphs: impl Iterator<Item = (String, Graph, Option<Vec<f64>>)>) {
    let (mut count, mut done, mut wrong) = (0, 0, Vec::new());
    for (name, graph, tolerances) in graphs {
        count += 1;
        match check(gpu, &graph, tolerances.as_deref()) {
            Ok(made) => done += usize::from(made.is_some()),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    println!("{done} of {count} graphs ran");
    assert!(
        wrong.is_empty(),
        "{} graphs are wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(done, count, "the target refuses graphs");
}

/// Elements of the largest tensor of most random graphs.
const SMALL: usize = 120;

fn random_config(families: &[Family], max_elements: usize) -> GraphConfig {
    GraphConfig {
        max_elements,
        floats: vec![DType::F32, DType::F32, DType::F64, DType::F16, DType::BF16],
        ..GraphConfig::of(families)
    }
}

fn random(
    families: &[Family],
    max_elements: usize,
    range: std::ops::Range<u64>,
) -> impl Iterator<Item = (String, Graph, Option<Vec<f64>>)> {
    let config = random_config(families, max_elements);
    let name = format!("{families:?}");
    seeds(range).map(move |seed| {
        let made = random_graph(seed, &config);
        (format!("{name} {seed}"), made.graph, Some(made.tolerances))
    })
}

#[test]
fn the_cases_of_the_compiler() {
    let Some(gpu) = gpu() else { return };
    // A test that was built elsewhere finds the folder by the variable.
    let root = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let folder = Path::new(&root).join("../kiln-compiler/tests/cases");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let graphs = files.map(|path| {
        let text = fs::read_to_string(&path).unwrap();
        let body: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        (name, Graph::parse(&body.join("\n")).unwrap(), None)
    });
    check_all(&gpu, graphs);
}

#[test]
fn nests() {
    let Some(gpu) = gpu() else { return };
    let families = [
        Family::Pointwise,
        Family::Reduce,
        Family::Movement,
        Family::Index,
        Family::Random,
    ];
    check_all(&gpu, random(&families, SMALL, 0..40));
}

#[test]
fn products() {
    let Some(gpu) = gpu() else { return };
    check_all(&gpu, random(&[Family::Dot, Family::Pointwise], SMALL, 100..130));
}

#[test]
fn images() {
    let Some(gpu) = gpu() else { return };
    check_all(
        &gpu,
        random(&[Family::Conv, Family::Pool, Family::Pointwise], SMALL, 200..240),
    );
}

#[test]
fn sorts() {
    let Some(gpu) = gpu() else { return };
    check_all(&gpu, random(&[Family::Sort, Family::Pointwise], SMALL, 300..320));
}

#[test]
fn attention() {
    let Some(gpu) = gpu() else { return };
    check_all(
        &gpu,
        random(&[Family::Attention, Family::Pointwise], SMALL, 400..430),
    );
}

/// A step of nine branches if nothing limited them, one of whose kernels uses local memory: it fails where
/// other processes use the GPU.
#[test]
fn a_step_of_many_branches() {
    let Some(gpu) = gpu() else { return };
    let config = random_config(&[Family::Attention, Family::Pointwise], SMALL);
    let made = random_graph(210_446, &config);
    for _ in 0..10 {
        check(&gpu, &made.graph, Some(&made.tolerances)).unwrap();
    }
}

#[test]
fn ten_processes_share_a_gpu() {
    if gpu().is_none() {
        return;
    }
    let child = || {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "a_step_of_many_branches"]);
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<Child> = (0..10).map(|_| child()).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
}

/// Several blocks, whole vectors, long rows, and what is fused with kernels of several tiles.
#[test]
fn larger_tensors() {
    let Some(gpu) = gpu() else { return };
    let beside = [Family::Pointwise, Family::Reduce, Family::Movement];
    let kernels = [
        Family::Index,
        Family::Dot,
        Family::Conv,
        Family::Pool,
        Family::Attention,
        Family::Sort,
    ];
    for (number, family) in kernels.into_iter().enumerate() {
        let families = [&beside[..], &[family]].concat();
        let first = 500 + 100 * number as u64;
        check_all(&gpu, random(&families, 10_000, first..first + 8));
    }
}

#[test]
fn a_step_of_one_rank_computes_through_nccl() {
    let Some(gpu) = gpu() else { return };
    let world = kiln_distributed::init().unwrap();
    match gpu.connect(&world) {
        Ok(ranks) => assert!(ranks.can_capture(), "its calls are captured"),
        Err(error @ CudaError::MissingLibrary { .. }) => {
            println!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    }
    let text = "graph @ranks {
        %weight = parameter 0 : f32[1024]
        %batch = parameter 1 : f32[1024]
        %gradient = mul %weight, %batch : f32[1024]
        %mean = all_reduce %gradient {ranks=1,mean=true} : f32[1024]
        %next = sub %weight, %mean : f32[1024]
        %all = all_gather %next {ranks=1} : f32[1024]
        %block = reduce_scatter %all {ranks=1} : f32[1024]
        %root = broadcast_from %block {ranks=1,root=0} : f32[1024]
        %count = parameter 2 : i64[3]
        %counts = all_reduce %count {ranks=1} : i64[3]
        return %next (alias 0), %root, %counts
    }";
    check(&gpu, &Graph::parse(text).unwrap(), None).unwrap().unwrap();
}
