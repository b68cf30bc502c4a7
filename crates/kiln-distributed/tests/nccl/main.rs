//! NCCL's table against a small library in C that writes down its calls (`fake.c`). The library takes orders
//! through the environment, so each test runs its part in a process of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_distributed::Error;
use kiln_distributed::nccl::{Communicator, Nccl, Shape, UniqueId};
use kiln_graph::{CollectiveKind, DType};

/// Builds the library into `folder`; none where there is no C compiler.
fn built(folder: &Path, more: &[&str]) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl/fake.c");
    let library = folder.join("libnccl.so.2");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .arg(&source)
        .args(more)
        .output();
    match compiled {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{text}");
            Some(library)
        }
        Err(_) => {
            eprintln!("skipped: there is no C compiler on this machine");
            None
        }
    }
}

/// A folder of the test's own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kiln-nccl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a part in a process of its own, with these variables; what it printed, and the library's log.
fn run(part: &str, variables: &[(&str, &str)]) -> Option<(String, String)> {
    let folder = Folder::new(&format!("{part}-{}", variables.len()));
    let library = built(&folder.0, &[])?;
    let log = folder.0.join("log");
    let output = Command::new(std::env::current_exe().expect("the test has a file"))
        .args(["a_part", "--exact", "--nocapture"])
        .env("KILN_PART", part)
        .env("KILN_LIBRARY", &library)
        .env("FAKE_NCCL_LOG", &log)
        .envs(variables.iter().copied())
        .output()
        .expect("the test starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}{errors}");
    Some((text, std::fs::read_to_string(&log).unwrap_or_default()))
}

fn shape(kind: CollectiveKind, dtype: DType, elements: usize) -> Shape {
    Shape {
        kind,
        mean: false,
        root: 0,
        dtype,
        elements,
    }
}

fn queue(communicator: &Communicator, shape: &Shape, from: u64, to: u64) -> Result<(), Error> {
    let stream = std::ptr::with_exposed_provenance_mut(0x77);
    // SAFETY: the library looks at no memory.
    unsafe { communicator.queue(shape, from, to, stream) }
}

/// What a test runs in a process of its own; nothing where nobody asks for a part.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    let library = PathBuf::from(std::env::var_os("KILN_LIBRARY").expect("the library's file"));
    let nccl = match Nccl::open(&library) {
        Ok(nccl) => nccl,
        Err(error) => {
            println!("said: {error}");
            return;
        }
    };
    assert_eq!(nccl.version(), "2.28.9");
    let id = nccl.unique_id().expect("an id");
    let communicator = match nccl.connect(id, 1, 4) {
        Ok(communicator) => communicator,
        Err(error) => {
            println!("said: {error}");
            return;
        }
    };
    assert_eq!((communicator.rank(), communicator.size()), (1, 4));
    match part.as_str() {
        "calls" => {
            let mean = Shape {
                mean: true,
                ..shape(CollectiveKind::AllReduce, DType::F32, 12)
            };
            queue(&communicator, &mean, 0x1000, 0x1000).expect("a mean");
            for (dtype, address) in [(DType::BF16, 0x2000), (DType::I64, 0x2100), (DType::U8, 0x2200)] {
                let sum = shape(CollectiveKind::AllReduce, dtype, 5);
                queue(&communicator, &sum, address, 0x3000).expect("a sum");
            }
            let scatter = shape(CollectiveKind::ReduceScatter, DType::F64, 8);
            assert_eq!(scatter.bytes(4), (64, 16));
            queue(&communicator, &scatter, 0x4000, 0x5000).expect("a block of a sum");
            let gather = shape(CollectiveKind::AllGather, DType::I16, 3);
            assert_eq!(gather.bytes(4), (6, 24));
            queue(&communicator, &gather, 0x6000, 0x7000).expect("the operands of all");
            let from_root = Shape {
                root: 3,
                ..shape(CollectiveKind::FromRoot, DType::Bool, 9)
            };
            queue(&communicator, &from_root, 0x8000, 0x9000).expect("the root's");
            communicator.look().expect("nothing has gone wrong");
        }
        "wrong" => {
            let cases = [
                shape(CollectiveKind::AllReduce, DType::I16, 4),
                shape(CollectiveKind::ReduceScatter, DType::F32, 6),
                Shape {
                    root: 4,
                    ..shape(CollectiveKind::FromRoot, DType::F32, 6)
                },
            ];
            for case in cases {
                let error = queue(&communicator, &case, 0x1000, 0x1000).expect_err("it does not fit");
                assert!(matches!(error, Error::Operands(_)), "{error}");
                println!("said: {error}");
            }
        }
        "look" => match communicator.look() {
            Ok(()) => println!("nothing has gone wrong"),
            Err(error) => println!("said: {error}"),
        },
        "abort" => {
            communicator.abort();
            communicator.forget();
        }
        "fail" => {
            let sum = shape(CollectiveKind::AllReduce, DType::F32, 12);
            let error = queue(&communicator, &sum, 0x1000, 0x1000).expect_err("the library refuses");
            println!("said: {error}");
        }
        other => panic!("there is no part {other}"),
    }
}

#[test]
fn calls_have_the_counts_types_and_operations_of_the_header() {
    let Some((_, log)) = run("calls", &[]) else { return };
    let expected = "ncclGetUniqueId
ncclCommInitRank rank 1 of 4, id known
ncclAllReduce 0x1000 -> 0x1000, 12 of type 7, op 4, rank 1, stream 0x77
ncclAllReduce 0x2000 -> 0x3000, 5 of type 9, op 0, rank 1, stream 0x77
ncclAllReduce 0x2100 -> 0x3000, 5 of type 4, op 0, rank 1, stream 0x77
ncclAllReduce 0x2200 -> 0x3000, 5 of type 1, op 0, rank 1, stream 0x77
ncclReduceScatter 0x4000 -> 0x5000, 2 of type 8, op 0, rank 1, stream 0x77
ncclAllGather 0x6000 -> 0x7000, 6 of type 1, rank 1, stream 0x77
ncclBroadcast 0x8000 -> 0x9000, 9 of type 1, root 3, rank 1, stream 0x77
ncclCommGetAsyncError
ncclCommDestroy
";
    assert_eq!(log, expected);
}

#[test]
fn operands_that_do_not_fit_reach_no_library() {
    let Some((said, log)) = run("wrong", &[]) else {
        return;
    };
    for reason in [
        "NCCL does not add up elements of i16",
        "do not divide among 4 ranks",
        "no rank 4",
    ] {
        assert!(said.contains(reason), "{said}");
    }
    assert!(
        !log.contains("ncclAllReduce") && !log.contains("ncclBroadcast"),
        "{log}"
    );
}

#[test]
fn failures_name_function_code_and_the_librarys_words() {
    let Some((said, _)) = run("fail", &[("FAKE_NCCL_FAIL", "ncclAllReduce")]) else {
        return;
    };
    let expected = "said: rank 1: ncclAllReduce failed with code 5 (invalid usage; the fake says why) at all_reduce of 12 f32";
    assert!(said.contains(expected), "{said}");
    let Some((said, _)) = run("fail", &[("FAKE_NCCL_FAIL", "ncclCommInitRank")]) else {
        return;
    };
    assert!(said.contains("when it connected rank 1 of 4"), "{said}");
    let Some((said, _)) = run("look", &[("FAKE_NCCL_FAIL", "later")]) else {
        return;
    };
    assert!(said.contains("code 6 (remote process exited"), "{said}");
    let Some((said, _)) = run("look", &[("FAKE_NCCL_FAIL", "busy")]) else {
        return;
    };
    assert!(said.contains("nothing has gone wrong"), "{said}");
}

#[test]
fn an_aborted_communicator_is_not_destroyed_again() {
    let Some((_, log)) = run("abort", &[]) else { return };
    assert!(log.ends_with("ncclCommAbort\n"), "{log}");
}

#[test]
fn libraries_that_do_not_do_are_refused() {
    let missing = Nccl::open(Path::new("/there/is/no/libnccl.so.2")).expect_err("there is none");
    assert!(matches!(&missing, Error::NcclLibrary { .. }), "{missing}");
    let Some((said, _)) = run("old", &[("FAKE_NCCL_VERSION", "21603")]) else {
        return;
    };
    assert!(
        said.contains("its version is 2.16.3, and 2.18 is the oldest that does"),
        "{said}"
    );
    let folder = Folder::new("lacks");
    let Some(library) = built(&folder.0, &["-DOLD"]) else {
        return;
    };
    let error = Nccl::open(&library).expect_err("a function is missing");
    assert!(
        error.to_string().contains("it has no function ncclGetLastError"),
        "{error}"
    );
}

#[test]
fn an_id_is_not_shown() {
    assert_eq!(format!("{:?}", UniqueId([1; UniqueId::BYTES])), "UniqueId(..)");
}
