//! The cache on disk: found again, damaged, unwritable, shared, evicted, each with the warnings it should
//! give.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use kiln_cpu::{
    AlignedBuffer, BuildOptions, Cache, CachedStep, CpuError, NoHooks, Origin, Signature, SourceFile,
    StepArguments, StepSource, ThreadPool, Toolchain, step_key,
};
use kiln_store::{CacheFolder, Key};

const LIMIT: u64 = 1 << 30;

/// A step without inputs that writes `value`.
fn source(value: u32) -> StepSource {
    let signature = Signature::new(0, 1, 0, 0).to_c();
    let text = format!(
        "#include \"kiln_runtime.h\"\n{signature}int kiln_step(const kiln_runtime *rt, void *const *i, void *const *o, \
         void *a, const uint64_t *s) {{ *(uint32_t *)o[0] = {value}; return 0; }}\n"
    );
    StepSource {
        name: format!("writes {value}"),
        files: vec![SourceFile::new("step.c", text)],
        payload: format!("plan of {value}"),
    }
}

fn key(value: u32) -> Key {
    let toolchain = Toolchain::detect().unwrap();
    step_key(&toolchain, &BuildOptions::default())
        .field("value", value.to_string())
        .finish()
}

fn obtain(cache: &Cache, value: u32) -> CachedStep {
    let toolchain = Toolchain::detect().unwrap();
    cache
        .get_or_build(&key(value), &toolchain, &BuildOptions::default(), || {
            Ok::<_, CpuError>(source(value))
        })
        .unwrap()
}

/// The value the step writes; checks the payload on the way.
fn value_of(step: &CachedStep) -> u32 {
    let mut out = 0u32;
    let mut arena = AlignedBuffer::zeroed(0).unwrap();
    let arguments = StepArguments {
        inputs: &[],
        outputs: &[(&raw mut out).cast()],
        arena: &mut arena,
        scalars: &[],
    };
    // SAFETY: one output of four bytes, as the source writes.
    unsafe { step.library.step().run(&ThreadPool::new(1), arguments, &NoHooks) }.unwrap();
    assert_eq!(step.payload, format!("plan of {out}"));
    out
}

/// Runs `body` and counts the warnings it gives.
fn warnings<T>(body: impl FnOnce() -> T) -> (T, Vec<String>) {
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let sink = Sink::default();
    let writer = sink.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let result = tracing::subscriber::with_default(subscriber, body);
    let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    (result, text.lines().map(str::to_owned).collect())
}

/// The only file in the cache that ends with `suffix`.
fn only_file(cache: &Cache, suffix: &str) -> PathBuf {
    let found: Vec<_> = fs::read_dir(cache.folder().unwrap())
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.to_str().unwrap().ends_with(suffix))
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

#[test]
fn found_again_with_its_payload() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), LIMIT);
    assert!(cache.get(&key(7)).is_none());
    let first = obtain(&cache, 7);
    assert!(matches!(first.origin, Origin::Built(_)));
    assert_eq!(value_of(&first), 7);

    // Another handle, as another process would have; the source must not be asked for.
    let again = Cache::at(folder.path(), LIMIT);
    let toolchain = Toolchain::detect().unwrap();
    let found = again
        .get_or_build(
            &key(7),
            &toolchain,
            &BuildOptions::default(),
            || -> Result<StepSource, CpuError> { panic!("generated although cached") },
        )
        .unwrap();
    assert_eq!((found.origin, value_of(&found)), (Origin::Cache, 7));
    assert!(again.get(&key(8)).is_none(), "another key is another step");
}

#[test]
fn keys_differ_by_each_part() {
    let toolchain = Toolchain::detect().unwrap();
    let base = || step_key(&toolchain, &BuildOptions::default());
    let debug = BuildOptions {
        debug_info: true,
        ..BuildOptions::default()
    };
    let keys = [
        base().finish(),
        base().field("graph", "ab").finish(),
        base().field("graph", "a").field("b", "").finish(),
        base().field("grap", "hab").finish(),
        step_key(&toolchain, &debug).finish(),
    ];
    let distinct: std::collections::HashSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len());
    assert_eq!(keys[0], base().finish());
    let jobs = BuildOptions {
        jobs: 17,
        ..BuildOptions::default()
    };
    assert_eq!(
        step_key(&toolchain, &jobs).finish(),
        keys[0],
        "parallelism does not change the result"
    );
}

#[test]
fn damage_is_noticed_reported_once_and_repaired() {
    type Damage = fn(&Cache);
    let cases: [(&str, Damage); 5] = [
        ("object cut short", |cache| {
            let path = only_file(cache, ".so");
            let bytes = fs::read(&path).unwrap();
            fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("one bit of the object", |cache| {
            let path = only_file(cache, ".so");
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            fs::write(path, &bytes).unwrap();
        }),
        ("object missing", |cache| {
            fs::remove_file(only_file(cache, ".so")).unwrap()
        }),
        ("description empty", |cache| {
            fs::write(only_file(cache, ".json"), "").unwrap()
        }),
        ("payload changed", |cache| {
            let path = only_file(cache, ".json");
            let text = fs::read_to_string(&path).unwrap();
            fs::write(path, text.replace("plan of 3", "plan of 4")).unwrap();
        }),
    ];
    for (name, damage) in cases {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path(), LIMIT);
        obtain(&cache, 3);
        damage(&cache);
        let (step, warned) = warnings(|| obtain(&cache, 3));
        assert!(matches!(step.origin, Origin::Built(_)), "{name}");
        assert_eq!(value_of(&step), 3, "{name}");
        assert_eq!(warned.len(), 1, "{name}: {warned:?}");
        assert!(warned[0].contains("damaged"), "{name}: {warned:?}");
        let (repaired, warned) = warnings(|| obtain(&cache, 3));
        assert_eq!((repaired.origin, warned.len()), (Origin::Cache, 0), "{name}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_costs_one_warning() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "in the way").unwrap();
    // Below a file no folder can be made, whoever we are (a mode of 0555 does not stop the superuser).
    let cache = Cache::at(file.join("cache"), LIMIT);
    let (values, warned) = warnings(|| [1, 2, 1].map(|value| value_of(&obtain(&cache, value))));
    assert_eq!(values, [1, 2, 1]);
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].contains("KILN_CACHE_DIR"), "{warned:?}");
}

#[cfg(unix)]
#[test]
fn a_read_only_folder_still_serves_what_it_has() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), LIMIT);
    obtain(&cache, 5);
    let set = |mode| fs::set_permissions(cache.folder().unwrap(), fs::Permissions::from_mode(mode)).unwrap();
    set(0o555);
    let (found, warned) = warnings(|| obtain(&Cache::at(folder.path(), LIMIT), 5));
    let (other, _) = warnings(|| obtain(&Cache::at(folder.path(), LIMIT), 6));
    set(0o755);
    assert_eq!(
        (found.origin, value_of(&found), warned.len()),
        (Origin::Cache, 5, 0)
    );
    assert_eq!(value_of(&other), 6);
}

#[test]
fn disabled_means_built_each_time() {
    let cache = Cache::disabled();
    for _ in 0..2 {
        let step = obtain(&cache, 9);
        assert!(matches!(step.origin, Origin::Built(_)));
        assert_eq!(value_of(&step), 9);
    }
}

#[test]
fn the_least_recently_used_go_first() {
    let folder = tempfile::tempdir().unwrap();
    let root = CacheFolder::at(folder.path(), LIMIT);
    let roomy = Cache::of(&root);
    for value in 0..3 {
        obtain(&roomy, value);
    }
    let listed = |store: &str| {
        let mut all = root.list().unwrap().into_iter();
        all.find(|listing| listing.store == store).unwrap()
    };
    let one = listed("steps").bytes() / 3;
    let object = listed("objects").bytes() / 3;
    // Last use as if some time lay between: 1 the oldest, then 0, then 2.
    for (age, value) in [(100, 2), (200, 0), (300, 1)] {
        let path = roomy.folder().unwrap().join(format!("{}.json", key(value)));
        let then = SystemTime::now() - Duration::from_secs(age);
        fs::File::options()
            .append(true)
            .open(path)
            .unwrap()
            .set_modified(then)
            .unwrap();
    }
    let names = || -> Vec<String> {
        let steps = listed("steps").entries;
        steps.iter().map(|entry| entry.name()).collect()
    };
    assert_eq!(names(), ["writes 2", "writes 0", "writes 1"]);
    assert_eq!(
        obtain(&roomy, 1).origin,
        Origin::Cache,
        "a use makes it the youngest"
    );
    assert_eq!(names(), ["writes 1", "writes 2", "writes 0"]);
    // The objects are younger than the steps that go.
    let tight = Cache::at(folder.path(), one * 5 / 2 + object * 4);
    obtain(&tight, 4);
    assert_eq!(names(), ["writes 4", "writes 1"]);
    let (count, bytes) = root.clear().unwrap();
    assert_eq!(count, 2 + 4, "steps and objects");
    assert!(bytes > one && names().is_empty());
    assert_eq!(files_in(tight.folder().unwrap(), ".so"), 0);
}

fn files_in(folder: &Path, suffix: &str) -> usize {
    fs::read_dir(folder)
        .unwrap()
        .filter(|f| f.as_ref().unwrap().path().to_str().unwrap().ends_with(suffix))
        .count()
}

/// Several processes start at once with a cold cache: each runs, one builds, no half-written file remains.
#[test]
fn processes_share_one_build() {
    const CHILD: &str = "KILN_CACHE_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let step = obtain(&Cache::from_env(), 11);
        println!("origin={:?} value={}", step.origin, value_of(&step));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..4)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "processes_share_one_build", "--nocapture"])
                .env(CHILD, "1")
                .env("KILN_CACHE_DIR", folder.path())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let outputs: Vec<String> = children
        .into_iter()
        .map(|child| String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap())
        .collect();
    assert!(
        outputs.iter().all(|text| text.contains("value=11")),
        "{outputs:?}"
    );
    let built = outputs
        .iter()
        .filter(|text| text.contains("origin=Built"))
        .count();
    assert_eq!(built, 1, "{outputs:?}");
    let steps = Cache::at(folder.path(), LIMIT);
    assert_eq!(files_in(steps.folder().unwrap(), ".so"), 1);
    assert!(
        fs::read_dir(steps.folder().unwrap())
            .unwrap()
            .all(|f| { !f.unwrap().file_name().to_str().unwrap().starts_with(".writing-") })
    );
}
