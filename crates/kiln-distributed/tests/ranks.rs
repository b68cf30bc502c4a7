//! Ranks that `mpirun` starts: this program again, with the name of a part in `KILN_PART`.
//!
//! Where there is no `mpirun` the tests say so and do nothing.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use kiln_distributed::{Error, Options, Place, World, imagine, init, init_with};
use kiln_graph::collective::combine;
use kiln_graph::{Collective, CollectiveKind, DType, HostTensor};

/// The `mpirun` of Open MPI and that of MPICH, if they are installed, each with the arguments that let it
/// start as root and start more ranks than there are cores.
fn launchers() -> Vec<Vec<&'static str>> {
    let is_open_mpi = |name: &str| {
        let version = as_root(&mut Command::new(name)).arg("--version").output();
        version.map(|it| !text(&it).contains("HYDRA")).ok()
    };
    let mut found = Vec::new();
    for name in ["mpirun.openmpi", "mpirun.mpich", "mpirun"] {
        match is_open_mpi(name) {
            _ if name == "mpirun" && !found.is_empty() => {}
            Some(true) => found.push(vec![name, "--oversubscribe", "--bind-to", "none"]),
            Some(false) => found.push(vec![name]),
            None => {}
        }
    }
    if found.is_empty() {
        eprintln!("skipped: there is no mpirun on this machine (Debian: openmpi-bin)");
    }
    found
}

/// Lets Open MPI's `mpirun` start as root, as it is on machines of a CI.
fn as_root(command: &mut Command) -> &mut Command {
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
}

/// Runs a part on so many ranks.
fn run(launcher: &[&str], ranks: usize, part: &str) -> Output {
    let program = std::env::current_exe().expect("the test has a file");
    as_root(&mut Command::new(launcher[0]))
        .args(&launcher[1..])
        .args(["-n", &ranks.to_string()])
        .arg(program)
        .args(["a_part", "--exact", "--nocapture"])
        .env("KILN_PART", part)
        .output()
        .expect("mpirun starts")
}

fn text(output: &Output) -> String {
    let [out, err] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    format!("{out}{err}")
}

fn succeed(ranks: usize, part: &str) {
    for launcher in launchers() {
        let output = run(&launcher, ranks, part);
        let text = text(&output);
        assert!(output.status.success(), "{launcher:?} -n {ranks} {part}:\n{text}");
        let done = text.matches(&format!("{part} is over")).count();
        assert_eq!(done, ranks, "{launcher:?} -n {ranks} {part}:\n{text}");
    }
}

/// What a rank of another test does; nothing where nobody asks for a part.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    match part.as_str() {
        "collectives" => collectives(&init().expect("the ranks are connected")),
        "overlap" => overlap(&init().expect("the ranks are connected")),
        "buckets" => buckets(&init().expect("the ranks are connected")),
        "link" => link(&init().expect("the ranks are connected")),
        "agreement" => agreement(&init().expect("the ranks are connected")),
        "imagined" => imagined(),
        "threads" => threads(&init().expect("the ranks are connected")),
        "lateness" => lateness(),
        "hang" => hang(),
        "death" => death(),
        "left alone" => left_alone(),
        "early end" => early_end(),
        "other collective" => other_collective(),
        "mixed" => mixed(),
        other => panic!("there is no part {other}"),
    }
    println!("{part} is over");
}

/// An operand of each rank, known to all.
fn operand(dtype: DType, count: usize, rank: usize) -> HostTensor {
    let number = |i: usize| ((i * 31 + rank * 17) % 97) as i64;
    match dtype.is_float() {
        true => HostTensor::from_floats(dtype, [count], (0..count).map(|i| number(i) as f64 / 8.0)),
        false => HostTensor::from_ints(dtype, [count], (0..count).map(|i| number(i) % 2)),
    }
}

/// Nobody bound the ranks: they share all CPUs that there are for them.
fn threads(world: &World) {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    assert_eq!(world.threads(), (allowed / world.size()).max(1));
}

fn collectives(world: &World) {
    let (rank, ranks) = (world.rank(), world.size());
    // One element, fewer than ranks, a direct sum, one in blocks that are not equal.
    for count in [1usize, 2, 300, 100_003] {
        for dtype in [
            DType::F32,
            DType::F64,
            DType::BF16,
            DType::F16,
            DType::I64,
            DType::U8,
        ] {
            let operands: Vec<HostTensor> = (0..ranks).map(|rank| operand(dtype, count, rank)).collect();
            let expect = |collective: Collective, operands: &[HostTensor]| {
                combine(&collective, operands).expect("it fits")[rank]
                    .bytes()
                    .to_vec()
            };
            let own = operands[rank].bytes();
            for mean in [false, true] {
                if mean && !dtype.is_float() {
                    continue;
                }
                let kind = |kind| Collective {
                    mean,
                    ..Collective::new(kind, ranks)
                };
                let mut sums = own.to_vec();
                world
                    .all_reduce(dtype, mean, &mut sums)
                    .expect("every rank adds up");
                let expected = expect(kind(CollectiveKind::AllReduce), &operands);
                assert!(
                    sums == expected || dtype == DType::F32 && mean,
                    "{dtype} {count} {mean}"
                );

                let whole: Vec<HostTensor> = (0..ranks)
                    .map(|rank| operand(dtype, count * ranks, rank))
                    .collect();
                let block = world
                    .reduce_scatter(dtype, mean, whole[rank].bytes())
                    .expect("every rank adds up");
                let expected = expect(kind(CollectiveKind::ReduceScatter), &whole);
                assert!(
                    block == expected || dtype == DType::F32 && mean,
                    "{dtype} {count} {mean}"
                );
            }
            let all = world.all_gather(own).expect("every rank gives");
            assert_eq!(
                all,
                expect(Collective::new(CollectiveKind::AllGather, ranks), &operands)
            );
            let mut bytes = own.to_vec();
            world.broadcast(ranks - 1, &mut bytes).expect("every rank takes");
            assert_eq!(bytes, operands[ranks - 1].bytes());
        }
    }
    // The same bits on every rank: sums that round.
    let third: Vec<u8> = (0..50_000)
        .flat_map(|i| (1.0f32 / (i + rank + 3) as f32).to_ne_bytes())
        .collect();
    let mut sums = third;
    world
        .all_reduce(DType::F32, true, &mut sums)
        .expect("every rank adds up");
    let all = world.all_gather(&sums).expect("every rank gives");
    assert!(all.chunks(sums.len()).all(|other| other == sums));
}

/// Several collectives under way at once, and their operands' memory as that of the results.
fn overlap(world: &World) {
    use kiln_distributed::Operands;
    let rank = world.rank();
    let mut buffers: Vec<Vec<f32>> = (0..8).map(|k| vec![(rank + k) as f32; 100_000 + k]).collect();
    let tickets: Vec<_> = buffers
        .iter_mut()
        .map(|buffer| {
            let pointer = buffer.as_mut_ptr().cast::<u8>();
            let operands = Operands {
                kind: CollectiveKind::AllReduce,
                mean: false,
                root: 0,
                dtype: DType::F32,
                from: pointer,
                bytes: 4 * buffer.len(),
                to: pointer,
            };
            // SAFETY: nobody touches the buffers until the tickets were waited for.
            unsafe { world.start(operands).expect("it begins") }
        })
        .collect();
    for ticket in tickets {
        ticket.wait().expect("every rank adds up");
    }
    for (k, buffer) in buffers.iter().enumerate() {
        let sum: usize = (0..world.size()).map(|rank| rank + k).sum();
        assert!(buffer.iter().all(|&x| x == sum as f32));
    }
}

/// Numbers whose sums round, added up whole and in pieces of every kind: below and above the size of a sum in one
/// exchange, with bounds inside of blocks and vectors.
fn buckets(world: &World) {
    const COUNT: usize = 60_000;
    let number = |i: usize| {
        let x = ((i * 2_654_435_761 + world.rank() * 40_503) % 1_000_003) as f32;
        (x - 5e5) / (1.0 + (i % 977) as f32)
    };
    for dtype in [DType::F32, DType::BF16] {
        let operand = HostTensor::from_floats(dtype, [COUNT], (0..COUNT).map(|i| f64::from(number(i))));
        for mean in [false, true] {
            let mut whole = operand.bytes().to_vec();
            world
                .all_reduce(dtype, mean, &mut whole)
                .expect("every rank adds up");
            for piece in [1237, 4096, 20_001, COUNT - 1] {
                let mut pieces = operand.bytes().to_vec();
                for piece in pieces.chunks_mut(piece * dtype.size()) {
                    world.all_reduce(dtype, mean, piece).expect("every rank adds up");
                }
                assert!(pieces == whole, "pieces of {piece} {dtype}, mean {mean}");
            }
        }
    }
}

fn link(world: &World) {
    let link = world
        .link()
        .expect("every rank measures")
        .expect("there are several");
    assert!(
        link.bandwidth > 0.0 && link.latency >= 0.0 && link.message > 0.0,
        "{link}"
    );
    let numbers = [link.bandwidth, link.latency, link.message];
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    let all = world.all_gather(&bytes).expect("every rank gives");
    assert!(
        all.chunks(bytes.len()).all(|other| other == bytes),
        "all have rank 0's"
    );
    // The second call measures nothing: ranks may call it when they like.
    if world.is_first() {
        assert_eq!(world.link(), Ok(Some(link)));
    }
    assert!(!world.waited().is_zero());
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| f32::from_ne_bytes(word)).collect()
}

fn imagined() {
    let world = imagine(3).expect("the process is in no world");
    assert_eq!((world.rank(), world.size(), world.link()), (0, 3, Ok(None)));
    let ranks = vec![operand(DType::F32, 6, 0); 3];
    let own = ranks[0].bytes();
    for (mean, kind) in [
        (false, CollectiveKind::AllReduce),
        (true, CollectiveKind::AllReduce),
        (false, CollectiveKind::ReduceScatter),
        (true, CollectiveKind::ReduceScatter),
        (false, CollectiveKind::AllGather),
    ] {
        let collective = Collective {
            mean,
            ..Collective::new(kind, 3)
        };
        let expected = combine(&collective, &ranks).expect("it fits")[0].clone();
        let given = match kind {
            CollectiveKind::ReduceScatter => world.reduce_scatter(DType::F32, mean, own),
            CollectiveKind::AllGather => world.all_gather(own),
            _ => {
                let mut bytes = own.to_vec();
                world.all_reduce(DType::F32, mean, &mut bytes).map(|()| bytes)
            }
        };
        // The operands are eighths: sums and means of three equal ones are exact, or rounded in one place.
        let given = given.expect("nobody is needed");
        let (given, expected) = (floats(&given), floats(expected.bytes()));
        assert_eq!(given.len(), expected.len(), "{kind} {mean}");
        for (a, b) in given.iter().zip(&expected) {
            assert!((a - b).abs() <= 1e-6 * b.abs(), "{kind} {mean}: {a} and {b}");
        }
    }
    world
        .agree(&[("the graph", "any".into())])
        .expect("all are equal");
    assert!(imagine(2).is_err());
}

fn agreement(world: &World) {
    let facts = |graph: &str| [("the graph", graph.to_owned()), ("threads", "1".to_owned())];
    world
        .agree(&facts("a graph of some length"))
        .expect("all are equal");
    let mine = if world.rank() == 1 { "b" } else { "a graph" };
    let error = world.agree(&facts(mine)).expect_err("rank 1 differs");
    assert_eq!(
        error.to_string(),
        "rank 1 differs from rank 0 in the graph: it has b, rank 0 has a graph"
    );
    // That broke nothing.
    world.agree(&facts("again")).expect("all are equal");
}

fn short() -> World {
    let timeout = Duration::from_millis(800);
    let options = Options {
        timeout,
        ..Options::default()
    };
    init_with(options).expect("the ranks are connected")
}

/// Longer than the timeout, by some of the ranks, who say so more than once and at different times.
fn lateness() {
    let world = short();
    for turn in 0..6 {
        let late = turn % 2 == 1 && !(turn / 2 + world.rank()).is_multiple_of(3);
        if late {
            world.be_late().expect("the ranks are connected");
            std::thread::sleep(world.timeout() + Duration::from_millis(700));
            world.be_late().expect("the ranks are connected");
        }
        let mut numbers = (world.rank() as f32 + turn as f32).to_ne_bytes();
        let summed = world.all_reduce(DType::F32, false, &mut numbers);
        summed.expect("whoever is late comes");
        assert_eq!(f32::from_ne_bytes(numbers), 3.0 + 3.0 * turn as f32);
    }
    // Nobody waits for what is said last.
    world.be_late().expect("the ranks are connected");
}

fn hang() {
    let world = short();
    let mut bytes = vec![0; 4096];
    world
        .all_reduce(DType::F32, true, &mut bytes)
        .expect("nobody hangs yet");
    if world.rank() == 2 {
        std::thread::sleep(Duration::from_secs(4));
        std::process::exit(0);
    }
    let begun = Instant::now();
    let error = world
        .all_reduce(DType::F32, true, &mut bytes)
        .expect_err("rank 2 hangs");
    assert!(begun.elapsed() < Duration::from_secs(3));
    let Error::Timeout { missing, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(missing, &[2]);
    println!("said: {error}");
    let again = world
        .all_reduce(DType::F32, true, &mut bytes)
        .expect_err("nothing is connected any more");
    assert!(matches!(again, Error::Broken(_)), "{again}");
    // Others are to say it, too, before mpirun ends them.
    std::thread::sleep(Duration::from_millis(700));
    std::process::exit(3);
}

fn death() {
    let world = short();
    let mut bytes = vec![0; 4096];
    world
        .all_reduce(DType::F32, true, &mut bytes)
        .expect("nobody is dead yet");
    if world.rank() == 1 {
        std::process::abort();
    }
    let error = world
        .all_reduce(DType::F32, true, &mut bytes)
        .expect_err("rank 1 is dead");
    println!("said: {error}");
    std::process::exit(3);
}

/// Waits patiently, as for a rank that compiles, for one that nobody says is dead.
fn left_alone() {
    let world = init().expect("the ranks are connected");
    world.agree(&[]).expect("nobody is dead yet");
    if world.rank() == 1 {
        std::process::abort();
    }
    let error = world.agree(&[]).expect_err("rank 1 is dead");
    assert!(
        matches!(&error, Error::Gone { missing, .. } if missing.contains(&1)),
        "{error}"
    );
    println!("said: {error}");
    std::process::exit(3);
}

fn early_end() {
    let world = short();
    if world.rank() == 1 {
        drop(world);
        std::thread::sleep(Duration::from_millis(300));
        std::process::exit(3);
    }
    let error = world
        .all_reduce(DType::F32, true, &mut [0; 8])
        .expect_err("rank 1 has ended");
    println!("said: {error}");
    std::thread::sleep(Duration::from_millis(300));
    std::process::exit(3);
}

fn other_collective() {
    let world = short();
    let bytes = if world.rank() == 1 { 16 } else { 8 };
    let error = world
        .all_reduce(DType::F32, false, &mut vec![0; bytes])
        .expect_err("they differ");
    println!("said: {error}");
    std::thread::sleep(Duration::from_millis(300));
    std::process::exit(3);
}

/// The library of the other MPI.
fn mixed() {
    let other = match std::env::var("OMPI_COMM_WORLD_SIZE") {
        Ok(_) => "libmpich.so.12",
        Err(_) => "libmpi.so.40",
    };
    let library = Some(other.to_owned());
    let error = init_with(Options {
        library,
        ..Options::default()
    })
    .expect_err("the ranks are not its own");
    println!("said: {error}");
    std::process::exit(3);
}

#[test]
fn collectives_give_what_they_mean() {
    for ranks in [2, 3, 4] {
        succeed(ranks, "collectives");
    }
}

#[test]
fn collectives_under_way_at_once() {
    succeed(3, "overlap");
}

/// A library with the interface of MPI 5: a shim over Open MPI that the test builds.
#[test]
fn the_interface_of_mpi_5_is_known() {
    let Some(launcher) = launchers().into_iter().find(|it| it.len() > 1) else {
        eprintln!("skipped: there is no Open MPI on this machine");
        return;
    };
    let folder = std::env::temp_dir().join(format!("kiln-mpi-5-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("there is room for a file");
    let library = folder.join("libmpi_abi.so.1");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library);
    compiler
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/abi/shim.c"))
        .arg("-ldl");
    match compiler.status() {
        Ok(status) => assert!(status.success(), "the shim compiles"),
        Err(error) => {
            eprintln!("skipped: there is no C compiler on this machine: {error}");
            return;
        }
    }
    let program = std::env::current_exe().expect("the test has a file");
    let output = as_root(&mut Command::new(launcher[0]))
        .args(&launcher[1..])
        .args(["-n", "2"])
        .arg(program)
        .args(["a_part", "--exact", "--nocapture"])
        .env("KILN_PART", "collectives")
        .env("KILN_MPI", &library)
        .output()
        .expect("mpirun starts");
    let text = text(&output);
    assert_eq!(text.matches("collectives is over").count(), 2, "{text}");
    let _ = std::fs::remove_dir_all(folder);
}

/// A Slurm, where there is one: `srun` is an interface of Open MPI's (PMIx) or MPICH's (PMI-2).
#[test]
fn srun_connects_ranks() {
    let srun = |interface: &str, part: &str| {
        let program = std::env::current_exe().expect("the test has a file");
        let mut command = Command::new("srun");
        command
            .args(["-n", "2", "--immediate=20", interface])
            .arg(program);
        command
            .args(["a_part", "--exact", "--nocapture"])
            .env("KILN_PART", part);
        command.output()
    };
    let there = Command::new("srun")
        .args(["-n", "2", "--immediate=20", "true"])
        .output();
    if !there.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: there is no Slurm on this machine");
        return;
    }
    let interfaces = Command::new("srun")
        .arg("--mpi=list")
        .output()
        .expect("srun lists them");
    for interface in ["pmix", "pmi2"] {
        if !text(&interfaces).contains(interface) {
            eprintln!("skipped: this Slurm has no {interface}");
            continue;
        }
        let text = text(&srun(&format!("--mpi={interface}"), "collectives").expect("srun starts"));
        assert_eq!(
            text.matches("collectives is over").count(),
            2,
            "{interface}: {text}"
        );
    }
}

#[test]
fn buckets_change_no_bit() {
    for ranks in [2, 3] {
        succeed(ranks, "buckets");
    }
}

#[test]
fn ranks_that_nobody_bound_divide_the_cpus() {
    for ranks in [2, 3] {
        succeed(ranks, "threads");
    }
}

#[test]
fn all_ranks_have_the_same_link() {
    succeed(3, "link");
}

#[test]
fn an_imagined_world_gives_what_equal_ranks_would() {
    // A process of its own: it has one world.
    let program = std::env::current_exe().expect("the test has a file");
    let mut command = Command::new(program);
    command
        .args(["a_part", "--exact", "--nocapture"])
        .env("KILN_PART", "imagined");
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn ranks_that_differ_are_named() {
    succeed(3, "agreement");
}

#[test]
fn a_rank_that_says_that_it_is_late_is_waited_for() {
    succeed(3, "lateness");
}

#[test]
fn a_rank_that_hangs_is_named_in_time() {
    for launcher in launchers() {
        let output = run(&launcher, 3, "hang");
        let text = text(&output);
        assert!(!output.status.success(), "{text}");
        assert!(
            text.contains("waited 0.8 s for rank 2, which did not take part in collective 1 (all_reduce"),
            "{text}"
        );
    }
}

#[test]
fn a_rank_that_dies_ends_the_others() {
    for launcher in launchers() {
        let begun = Instant::now();
        let output = run(&launcher, 3, "death");
        assert!(!output.status.success(), "{}", text(&output));
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}

/// The launcher's children are shells, which live on: the ranks have to notice it themselves.
#[test]
fn a_rank_that_dies_is_noticed_without_the_launcher() {
    if !launchers().iter().any(|launcher| launcher[0] == "mpirun.mpich") {
        eprintln!("skipped: there is no mpirun.mpich on this machine (Debian: mpich)");
        return;
    }
    let begun = Instant::now();
    let output = Command::new("mpirun.mpich")
        .args([
            "-n",
            "3",
            "sh",
            "-c",
            "\"$0\" a_part --exact --nocapture; sleep 8",
        ])
        .arg(std::env::current_exe().expect("the test has a file"))
        .env("KILN_PART", "left alone")
        .output()
        .expect("mpirun starts");
    let text = text(&output);
    assert!(
        text.contains("rank 0: rank 1 ended, and took no part in collective"),
        "{text}"
    );
    assert_eq!(text.matches("said: ").count(), 2, "{text}");
    assert!(begun.elapsed() < Duration::from_secs(40));
}

#[test]
fn a_rank_that_ends_early_is_named() {
    for launcher in launchers() {
        let text = text(&run(&launcher, 2, "early end"));
        let said = "rank 0 is at collective 0 (all_reduce of 8 bytes of f32, divided by their number), but rank 1 is at its \
                    end, after 0 collectives";
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn another_collective_is_named() {
    for launcher in launchers() {
        let text = text(&run(&launcher, 2, "other collective"));
        assert!(
            text.contains("rank 1 is at collective 0 (all_reduce of 16 bytes"),
            "{text}"
        );
    }
}

#[test]
fn a_mixed_world_is_refused() {
    if launchers().len() < 2 {
        eprintln!("skipped: there are not both Open MPI and MPICH on this machine");
        return;
    }
    for launcher in launchers() {
        let text = text(&run(&launcher, 2, "mixed"));
        assert!(
            text.contains("mixed world:") && text.contains("rank 0 of 1"),
            "{text}"
        );
    }
}

#[test]
fn one_rank_needs_no_mpi() {
    if Place::read(|name| std::env::var(name).ok()) != Ok(Place::ALONE) {
        return;
    }
    let options = Options {
        library: Some("there is no such library".into()),
        ..Options::default()
    };
    let world = init_with(options).expect("one rank is connected with itself");
    assert_eq!((world.rank(), world.size(), world.library()), (0, 1, None));
    let mut bytes = 3f32.to_ne_bytes();
    world
        .all_reduce(DType::F32, true, &mut bytes)
        .expect("it has the sum");
    assert_eq!(f32::from_ne_bytes(bytes), 3.0);
    assert_eq!(world.all_gather(&[1, 2]).expect("it has all"), [1, 2]);
    world
        .agree(&[("everything", "equal".into())])
        .expect("it agrees with itself");
    let error = world
        .all_reduce(DType::F32, true, &mut [0; 3])
        .expect_err("no whole elements");
    assert!(matches!(error, Error::Operands(_)), "{error}");
}
