//! Training on several ranks with GPUs, through NCCL: this program again, as `torchrun` would start it.
//!
//! Each rank takes a GPU of its own. Where there are fewer GPUs than ranks, NCCL (2.30 or later) puts several on one if
//! `NCCL_MULTI_RANK_GPU_ENABLE=1`. Without GPUs or NCCL the tests say so and do nothing.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_nn::{Linear, LinearConfig};
use burn_optim::AdamWConfig;
use burn_optim::grad_clipping::GradientClippingConfig;
use kiln::distributed::{self, Options, World};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, TrainStep};

type B = Autodiff<Kiln>;

const STEPS: usize = 40;
/// Examples of a step, on all ranks together.
const EXAMPLES: usize = 24;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    last: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        // The second weight fills a bucket by itself.
        Self {
            first: LinearConfig::new(6, 640).init(device),
            second: LinearConfig::new(640, 640).init(device),
            last: LinearConfig::new(640, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.second.forward(self.first.forward(x).tanh()).tanh();
        self.last.forward(x)
    }
}

/// A rank's share of the examples of a step: inputs, targets.
fn share(step: usize, world: &World, device: &KilnDevice) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let number = |i: usize| ((i * 37 + step * 101) % 199) as f32 / 99.5 - 1.0;
    let rows = EXAMPLES / world.size();
    let from = world.rank() * rows;
    let x: Vec<f32> = (from * 6..(from + rows) * 6).map(number).collect();
    let y: Vec<f32> = (0..rows * 2).map(|i| x[i / 2 * 6 + i % 2] * 0.7).collect();
    (
        Tensor::from_data(TensorData::new(x, [rows, 6]), device),
        Tensor::from_data(TensorData::new(y, [rows, 2]), device),
    )
}

fn loss(net: &Net<B>, (x, y): (Tensor<B, 2>, Tensor<B, 2>)) -> Tensor<B, 1> {
    (net.forward(x) - y).powf_scalar(2.0).mean()
}

fn train(world: &World, wait: impl Fn(usize)) -> Result<Vec<f32>, String> {
    let device = distributed::device(world);
    B::seed(&device, 11 + world.rank() as u64);
    let optim = AdamWConfig::new()
        .with_grad_clipping(Some(GradientClippingConfig::Norm(0.05)))
        .init();
    let options = CompileOptions::default().with_backend(CompileBackend::Cuda);
    let mut step = TrainStep::new(Net::<B>::new(&device), optim, loss)
        .with_options(options)
        .with_data_parallel(world)
        .build()
        .map_err(|error| error.to_string())?;
    let mut losses = Vec::new();
    for number in 0..STEPS {
        wait(number);
        let loss = step
            .step(1e-3, share(number, world, &device))
            .map_err(|error| error.to_string())?;
        let loss = loss.try_into_data().map_err(|error| format!("{error:?}"))?;
        losses.push(loss.to_vec::<f32>().expect("one f32")[0]);
    }
    assert!(step.history().replayed > 20, "{:?}", step.history());
    // All ranks have the same parameters.
    let model = step.model().expect("no step failed");
    let weights = model.second.weight.val().into_data();
    let all = world.all_gather(&weights.bytes).expect("every rank gives");
    assert!(
        all.chunks(weights.bytes.len())
            .all(|other| *other == weights.bytes[..])
    );
    Ok(losses)
}

/// What a rank of another test does; nothing where nobody asks for a part.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    let timeout = Duration::from_secs(if part == "train" { 60 } else { 5 });
    let options = Options {
        timeout,
        ..Options::default()
    };
    let world = match distributed::init_with(options) {
        Ok(world) => world,
        Err(error) => {
            println!("refused: {error}");
            return;
        }
    };
    match part.as_str() {
        "train" => {
            let losses = train(&world, |_| {}).expect("it trains");
            let bits: Vec<String> = losses
                .iter()
                .map(|loss| format!("{:08x}", loss.to_bits()))
                .collect();
            println!("\nlosses {}", bits.join(" "));
        }
        "death" | "hang" => {
            let end = |step| {
                if step == 20 && world.rank() == 1 {
                    if part == "hang" {
                        std::thread::sleep(Duration::from_secs(20));
                    }
                    std::process::exit(4);
                }
            };
            let error = train(&world, end).expect_err("rank 1 is missing");
            println!("\nsaid: {error}");
            std::process::exit(3);
        }
        other => panic!("there is no part {other}"),
    }
}

fn start(part: &str, rank: usize, size: usize, port: u16) -> Child {
    Command::new(std::env::current_exe().expect("the test has a file"))
        .args(["a_part", "--exact", "--nocapture"])
        .env("KILN_PART", part)
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", size.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("LOCAL_WORLD_SIZE", size.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a rank starts")
}

/// Runs a part on so many ranks; what each printed. None where they cannot be connected.
fn run(part: &str, size: usize) -> Option<Vec<String>> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port().min(60_000);
    drop(listener);
    let ranks: Vec<Child> = (0..size).map(|rank| start(part, rank, size, port)).collect();
    let text = |child: Child| {
        let output = child.wait_with_output().expect("a rank ends");
        let [out, err] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        format!("{out}{err}")
    };
    let texts: Vec<String> = ranks.into_iter().map(text).collect();
    for text in &texts {
        if let Some(at) = text.find("refused: ") {
            let reason = text[at..].lines().next().unwrap_or_default();
            assert!(!has_gpus(size), "{text}");
            eprintln!("skipped: {reason}");
            return None;
        }
    }
    Some(texts)
}

/// Whether there must be no excuse.
fn has_gpus(ranks: usize) -> bool {
    let count = std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count);
    count >= ranks || count > 0 && std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some()
}

fn losses(text: &str) -> Vec<f32> {
    let line = text.lines().find_map(|line| line.strip_prefix("losses "));
    let bits = line.unwrap_or_else(|| panic!("no losses:\n{text}")).split(' ');
    bits.map(|bits| f32::from_bits(u32::from_str_radix(bits, 16).expect("bits")))
        .collect()
}

#[test]
fn ranks_compute_what_one_rank_computes() {
    let Some(first) = run("train", 2) else { return };
    let all: Vec<Vec<f32>> = first.iter().map(|text| losses(text)).collect();
    assert_eq!(all[0], all[1], "the loss is the mean over ranks");
    let alone = losses(&run("train", 1).expect("one rank needs nobody")[0]);
    for (step, (one, two)) in alone.iter().zip(&all[0]).enumerate() {
        assert!(
            (one - two).abs() <= 1e-4 * one.abs().max(1e-2),
            "step {step}: {one} and {two}"
        );
    }
    assert!(alone[STEPS - 1] < 0.8 * alone[0], "{alone:?}");
    // The same bits again.
    let again = run("train", 2).expect("they met before");
    assert_eq!(losses(&again[0]), all[0]);
}

#[test]
fn a_rank_that_is_missing_is_named() {
    for (part, said) in [
        ("death", "rank 1 ended"),
        ("hang", "for rank 1, which did not take part"),
    ] {
        let begun = Instant::now();
        let Some(texts) = run(part, 2) else { return };
        assert!(
            texts[0].contains("said: ") && texts[0].contains(said),
            "{}",
            texts[0]
        );
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
