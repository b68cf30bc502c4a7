//! Ranks as `torchrun` starts them inside a step of other launchers: this program again, with that
//! environment, on the loopback interface.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kiln_distributed::nccl::Shape;
use kiln_distributed::{Carrier, Error, Launcher, Options, World, init_with};
use kiln_graph::{CollectiveKind, DType};

/// A port at which nobody listens, nor at the next ones.
fn port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port().min(60_000)
}

struct Rank<'a> {
    part: &'a str,
    rank: usize,
    size: usize,
    port: u16,
}

impl Rank<'_> {
    fn start(&self) -> Child {
        Command::new(std::env::current_exe().expect("the test has a file"))
            .args(["a_part", "--exact", "--nocapture"])
            // torchrun itself is the only rank of what it was started by, and its ranks inherit that.
            .envs([("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")])
            .envs([("PMI_RANK", "0"), ("PMI_SIZE", "1")])
            .envs([("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")])
            .env("TORCHELASTIC_RUN_ID", "none")
            .env("KILN_PART", self.part)
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", self.port.to_string())
            .env("RANK", self.rank.to_string())
            .env("WORLD_SIZE", self.size.to_string())
            .env("LOCAL_RANK", self.rank.to_string())
            .env("LOCAL_WORLD_SIZE", self.size.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a rank starts")
    }
}

/// Starts the ranks of a part in any order; what each printed.
fn run(part: &str, size: usize, port: u16) -> Vec<String> {
    let start = |rank| {
        Rank {
            part,
            rank,
            size,
            port,
        }
        .start()
    };
    let ranks: Vec<Child> = (0..size).rev().map(start).collect();
    let mut texts: Vec<String> = ranks.into_iter().map(text).collect();
    texts.reverse();
    texts
}

fn text(child: Child) -> String {
    let output = child.wait_with_output().expect("a rank ends");
    let [out, err] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    format!("{out}{err}")
}

fn connected(milliseconds: u64) -> Result<World, Error> {
    init_with(Options {
        timeout: Duration::from_millis(milliseconds),
        ..Options::default()
    })
}

/// What a rank does; nothing where nobody asks for a part.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    match part.as_str() {
        "collectives" => collectives(&connected(20_000).expect("the ranks meet")),
        "hang" | "death" => missing(&part),
        "alone" => println!("said: {}", connected(700).expect_err("nobody comes")),
        "large" => {
            let world = connected(20_000).expect("the ranks meet");
            let error = world
                .broadcast(0, &mut vec![0; 100_000])
                .expect_err("nothing carries it");
            println!("said: {error}");
        }
        "panic" => {
            let world = connected(20_000).expect("the ranks meet");
            world.carry_by(Box::new(Panics));
            let mut large = vec![3u8; 100_000];
            for _ in 0..2 {
                let error = world.all_reduce(DType::U8, false, &mut large);
                println!("said: {}", error.expect_err("the carrier panics"));
            }
        }
        "quick" => match connected(20_000) {
            Ok(world) => {
                let same = world.agree(&[("the program", "the same".into())]);
                println!("said: {same:?}");
            }
            Err(error) => println!("said: {error}"),
        },
        other => panic!("there is no part {other}"),
    }
    println!("{part} is over");
}

/// Adds what all ranks are known to have.
struct Known(usize);

impl Carrier for Known {
    fn carry(&mut self, shape: &Shape, operand: &[u8], result: &mut [u8], _: Duration) -> Result<(), Error> {
        assert_eq!((shape.kind, shape.dtype), (CollectiveKind::AllReduce, DType::U8));
        for (to, &from) in result.iter_mut().zip(operand) {
            *to = from.wrapping_mul(self.0 as u8);
        }
        Ok(())
    }
}

struct Panics;

impl Carrier for Panics {
    fn carry(&mut self, _: &Shape, _: &[u8], _: &mut [u8], _: Duration) -> Result<(), Error> {
        panic!("the carrier has a defect")
    }
}

fn collectives(world: &World) {
    let (rank, size) = (world.rank(), world.size());
    assert_eq!((world.launcher(), world.has_mpi()), (Launcher::Torchrun, false));
    let own: Vec<u8> = (0..12).map(|i| (10 * rank + i) as u8).collect();
    let all = world.all_gather(&own).expect("every rank gives");
    let expected: Vec<u8> = (0..size)
        .flat_map(|rank| (0..12).map(move |i| (10 * rank + i) as u8))
        .collect();
    assert_eq!(all, expected);
    let mut sum = [rank as f32, 2.0].map(f32::to_ne_bytes).concat();
    world
        .all_reduce(DType::F32, true, &mut sum)
        .expect("every rank adds");
    let mean = (0..size).sum::<usize>() as f32 / size as f32;
    assert_eq!(sum, [mean, 2.0].map(f32::to_ne_bytes).concat());
    let block = world
        .reduce_scatter(DType::U8, false, &vec![rank as u8 + 1; 2 * size])
        .expect("every rank adds");
    assert_eq!(block, vec![(1..=size).sum::<usize>() as u8; 2]);
    let mut id = [rank as u8; 128];
    world
        .broadcast_patiently(size - 1, &mut id)
        .expect("every rank takes");
    assert_eq!(id, [size as u8 - 1; 128]);
    let mine = if rank == 1 { "b" } else { "a" };
    let error = world
        .agree(&[("a letter", mine.into())])
        .expect_err("rank 1 differs");
    assert_eq!(
        error.to_string(),
        "rank 1 differs from rank 0 in a letter: it has b, rank 0 has a"
    );
    // Large operands go over the carrier, and without one it is said what to do.
    let mut large = vec![3u8; 100_000];
    world.carry_by(Box::new(Known(size)));
    world
        .all_reduce(DType::U8, false, &mut large)
        .expect("the carrier adds");
    assert_eq!(large, vec![3 * size as u8; 100_000]);
}

fn missing(part: &str) {
    let world = connected(2_500).expect("the ranks meet");
    world.all_gather(&[1]).expect("all are there");
    if world.rank() == 2 {
        if part == "hang" {
            std::thread::sleep(Duration::from_secs(6));
        }
        std::process::exit(0);
    }
    let error = world.all_gather(&[2]).expect_err("rank 2 is missing");
    println!("said: {error}");
    println!(
        "said: {}",
        world.all_gather(&[3]).expect_err("nothing connects them")
    );
}

#[test]
fn ranks_meet_and_exchange() {
    for size in [2, 4] {
        for text in run("collectives", size, port()) {
            assert!(text.contains("collectives is over"), "{text}");
        }
    }
}

#[test]
fn ranks_meet_beside_a_listener_of_the_launcher() {
    // Like torchrun's own store: it listens at the port, and answers nothing that ranks understand.
    let store = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = store.local_addr().expect("an address").port();
    store.set_nonblocking(true).expect("an option");
    let ranks: Vec<Child> = (0..2)
        .map(|rank| {
            Rank {
                part: "quick",
                rank,
                size: 2,
                port,
            }
            .start()
        })
        .collect();
    let mut visitors = 0;
    let mut connections: Vec<TcpStream> = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) && visitors == 0 {
        if let Ok((stream, _)) = store.accept() {
            visitors += 1;
            connections.push(stream);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // Whoever is asked by mistake hangs up.
    drop(connections);
    drop(store);
    for rank in ranks {
        let text = text(rank);
        assert!(text.contains("said: Ok(())"), "{text}");
    }
}

#[test]
fn a_rank_that_hangs_is_named_in_time() {
    let texts = run("hang", 3, port());
    for (rank, text) in texts.iter().take(2).enumerate() {
        let said = format!(
            "said: rank {rank} waited 2.5 s for rank 2, which did not take part in collective 1 (all_gather"
        );
        assert!(text.contains(&said), "{text}");
        assert!(text.contains("said: the ranks are no longer connected"), "{text}");
    }
}

#[test]
fn a_rank_that_dies_is_named_at_once() {
    let texts = run("death", 3, port());
    for (rank, text) in texts.iter().take(2).enumerate() {
        let said = format!("said: rank {rank}: rank 2 ended, and took no part in collective 1 (all_gather");
        assert!(text.contains(&said), "{text}");
    }
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let port = port();
    let alone = |rank| {
        let part = "alone";
        text(
            Rank {
                part,
                rank,
                size: 3,
                port,
            }
            .start(),
        )
    };
    let first = alone(0);
    assert!(
        first.contains("rank 0 waited 0.7 s for ranks 1, 2, which did not take part in the meeting"),
        "{first}"
    );
    let other = alone(1);
    assert!(other.contains("rank 1 waited 0.7 s for rank 0"), "{other}");
}

#[test]
fn another_number_of_ranks_is_named_on_both() {
    let port = port();
    let part = "quick";
    let ranks = [
        Rank {
            part,
            rank: 0,
            size: 2,
            port,
        },
        Rank {
            part,
            rank: 1,
            size: 3,
            port,
        },
    ];
    let texts: Vec<String> = ranks.map(|rank| rank.start()).into_iter().map(text).collect();
    for text in texts {
        let said = "rank 1 was started as one of 3 ranks, and rank 0 as one of 2";
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn strangers_are_shown_out() {
    let port = port();
    let part = "quick";
    let first = Rank {
        part,
        rank: 0,
        size: 2,
        port,
    }
    .start();
    // A frame that claims four gigabytes, and one of another job.
    let mut other_job = b"kilnran2".to_vec();
    for number in [u32::from(port) + 1, 2, 1] {
        other_job.extend(number.to_le_bytes());
    }
    other_job.extend(7u64.to_le_bytes());
    let long = u32::MAX.to_le_bytes().to_vec();
    let framed = [&(other_job.len() as u32).to_le_bytes()[..], &other_job].concat();
    for bytes in [long, framed] {
        let begun = Instant::now();
        let stream = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(10), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut stream = stream;
        stream.write_all(&bytes).expect("the listener takes it");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.ends_with(b"other job"), "{answer:?}");
    }
    let second = Rank {
        part,
        rank: 1,
        size: 2,
        port,
    }
    .start();
    for rank in [first, second] {
        let text = text(rank);
        assert!(text.contains("said: Ok(())"), "{text}");
    }
}

#[test]
fn large_operands_without_a_gpu_are_refused() {
    for text in run("large", 2, port()) {
        assert!(
            text.contains("over NCCL") && text.contains("`mpirun -n 2 PROGRAM`"),
            "{text}"
        );
    }
}

#[test]
fn a_carrier_that_panics_leaves_nobody_waiting() {
    for text in run("panic", 2, port()) {
        let said = "said: the ranks are no longer connected: the thread that connects them panicked";
        assert!(text.contains(said), "{text}");
        assert!(text.contains("panic is over"), "{text}");
    }
}
