//! Training on several ranks with GPUs, through NCCL: this program again, as `torchrun` would start it.
//!
//! Each rank takes a GPU of its own. Where there are fewer GPUs than ranks, NCCL (2.30 or later) puts several on one if
//! `NCCL_MULTI_RANK_GPU_ENABLE=1`. Without GPUs or NCCL the tests say so and do nothing.

mod launch;

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_nn::{Linear, LinearConfig};
use burn_optim::AdamWConfig;
use burn_optim::grad_clipping::GradientClippingConfig;
use kiln::distributed::{self, Options, World};
use kiln::{CompileBackend, CompileOptions, TrainStep};
use launch::examples::{B, Batch, examples, same_on_all, share_of, squares};
use launch::{agree, losses_in, print};

const STEPS: usize = 40;

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

fn loss(net: &Net<B>, (x, y): Batch) -> Tensor<B, 1> {
    squares(net.forward(x), y)
}

fn train(world: &World, sharded: bool, wait: impl Fn(usize)) -> Result<Vec<f32>, String> {
    let device = distributed::device(world);
    B::seed(&device, 11 + world.rank() as u64);
    let optim = AdamWConfig::new()
        .with_grad_clipping(Some(GradientClippingConfig::Norm(0.05)))
        .init();
    let options = CompileOptions::default().with_backend(CompileBackend::Cuda);
    let mut step = TrainStep::new(Net::<B>::new(&device), optim, loss)
        .with_options(options)
        .with_data_parallel(world);
    if sharded {
        step = step.with_sharded_state();
    }
    let mut step = step.build().map_err(|error| error.to_string())?;
    let mut losses = Vec::new();
    for number in 0..STEPS {
        wait(number);
        let loss = step
            .step(1e-3, share_of(examples(number), world, &device))
            .map_err(|error| error.to_string())?;
        let loss = loss.try_into_data().map_err(|error| format!("{error:?}"))?;
        losses.push(loss.to_vec::<f32>().expect("one f32")[0]);
    }
    assert!(step.history().replayed > 20, "{:?}", step.history());
    let model = step.model().expect("no step failed");
    same_on_all(world, model.second.weight.val());
    Ok(losses)
}

/// What a rank of another test does; nothing where nobody asks for a part.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    let timeout = Duration::from_secs(match part.as_str() {
        "train" | "sharded" => 60,
        _ => 5,
    });
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
        "train" | "sharded" => {
            let losses = train(&world, part == "sharded", |_| {}).expect("it trains");
            // Each rank has a pipe of its own.
            print(true, &losses);
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
            let error = train(&world, false, end).expect_err("rank 1 is missing");
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

/// The longest that a rank may take, start and compilation included.
const LONGEST: Duration = Duration::from_secs(150);

/// What a rank prints. One that does not end is killed, and its threads are named.
fn text(mut child: Child) -> String {
    let read = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let out = read(Box::new(child.stdout.take().expect("it has a pipe")));
    let err = read(Box::new(child.stderr.take().expect("it has a pipe")));
    let begun = Instant::now();
    let mut note = String::new();
    while child.try_wait().expect("it is a child").is_none() {
        if begun.elapsed() > LONGEST && note.is_empty() {
            note = format!(
                "\nkilled after {LONGEST:?}, with the threads {}",
                threads(child.id())
            );
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let [out, err] = [out, err].map(|pipe| pipe.join().expect("it is read"));
    format!("{out}{err}{note}")
}

/// The threads of a process, each with its state and what it waits for in the system.
fn threads(process: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task"));
    let of = |task: std::fs::DirEntry| {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let state = read("stat")
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .trim()
            .chars()
            .next();
        format!(
            "`{}` {} {}",
            read("comm").trim(),
            state.unwrap_or('?'),
            read("wchan").trim()
        )
    };
    let all: Vec<String> = tasks.into_iter().flatten().flatten().map(of).collect();
    all.join(", ")
}

/// Runs a part on so many ranks; what each printed. None where they cannot be connected.
fn run(part: &str, size: usize) -> Option<Vec<String>> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port().min(60_000);
    drop(listener);
    let ranks: Vec<Child> = (0..size).map(|rank| start(part, rank, size, port)).collect();
    let ranks: Vec<_> = ranks
        .into_iter()
        .map(|child| std::thread::spawn(|| text(child)))
        .collect();
    let texts: Vec<String> = ranks
        .into_iter()
        .map(|rank| rank.join().expect("it is read"))
        .collect();
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

#[test]
fn ranks_compute_what_one_rank_computes() {
    for part in ["train", "sharded"] {
        let Some(first) = run(part, 2) else { return };
        let all: Vec<Vec<f32>> = first.iter().map(|text| losses_in(text)).collect();
        assert_eq!(all[0], all[1], "the loss is the mean over ranks");
        let alone = losses_in(&run("train", 1).expect("one rank needs nobody")[0]);
        agree(&alone, &all[0], part);
        assert!(alone[STEPS - 1] < 0.8 * alone[0], "{alone:?}");
        // The same bits again.
        let again = run(part, 2).expect("they met before");
        assert_eq!(losses_in(&again[0]), all[0]);
    }
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
