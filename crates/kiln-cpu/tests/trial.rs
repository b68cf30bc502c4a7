//! A compiler that is wrong is noticed, named and passed over; one that is right is tried once.

#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use kiln_cpu::{Cache, CpuError, Distrust, Toolchain, try_compiler};
use kiln_store::CacheFolder;

/// A compiler at `folder/name`: `cc` after `fault`, a line of shell that runs where the sources are. It notes
/// each source that it compiles.
fn plant(folder: &Path, name: &str, fault: &str) -> String {
    let path = folder.join(name);
    let cc = Toolchain::detect().unwrap().command();
    let count = folder.join("compiled");
    let text = format!(
        "#!/bin/sh\nextra=\ncase \" $* \" in *' -c '*) echo x >> '{}'; {fault} ;; esac\nexec {cc} \"$@\" $extra\n",
        count.display()
    );
    // Renamed into place: a program that is being written cannot be run.
    let new = folder.join("new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, &path).unwrap();
    path.to_str().unwrap().to_owned()
}

/// How many sources the planted compilers of `folder` have compiled.
fn compiled(folder: &Path) -> usize {
    fs::read_to_string(folder.join("compiled")).map_or(0, |text| text.lines().count())
}

fn toolchain(command: &str) -> Toolchain {
    Toolchain::from_candidates(&[command]).unwrap()
}

/// The verdicts that the cache in `folder` has.
fn verdicts(cache: &Cache) -> Vec<PathBuf> {
    let files = fs::read_dir(cache.folder().unwrap()).unwrap();
    let paths = files.map(|file| file.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|it| it == "note"))
        .collect()
}

/// The function that a compiler with `fault` is refused for.
fn refused_for(fault: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let command = plant(folder.path(), "faulty", fault);
    match try_compiler(&toolchain(&command), &Cache::disabled()) {
        Err(Distrust::Wrong { function, .. }) => function,
        other => panic!("{fault}: {other:?}"),
    }
}

#[test]
fn each_fault_is_named() {
    // Where an instruction rounds vectors, the rounding that is written out is only met one by one.
    let rounding = match Toolchain::detect().unwrap().isa().has_bf16_pairs() {
        true => "matrix product of bf16",
        false => "cast of f32 to bf16",
    };
    // The damage to the sources or the flags, and the function that must be named.
    let faults = [
        ("sed -i 's/0x1.06eba8p-3f/0x1.06eba8p-2f/' *.h", "erf of f32"),
        ("sed -i 's/-0x1.7f7d1cp-20f/0x1.7f7d1cp-20f/' *.h", "exp of f32"),
        (
            "sed -i 's/vf_copysign(vf_select(a < 0.625f/(vf_select(a < 0.625f/; s/small, large), x)/small, large))/' *.h",
            "tanh of f32",
        ),
        ("extra=-Dfloorf=ceilf", "floor of f32"),
        ("extra=-ffinite-math-only", ""),
        ("extra=-ffast-math", ""),
        (
            "sed -i 's/0xCD9E8D57/0xCD9E8D59/' *.h",
            "uniform f32 random numbers",
        ),
        (
            "sed -i 's/KILN_FOLD(prod, S, T, (T)(a \\* b))/KILN_FOLD(prod, S, T, (T)(a))/' *.h",
            "prod of f32 along axis 1",
        ),
        ("sed -i 's/0x7fff + ((u >> 16) & 1)/0x7fff/' *.h", rounding),
    ];
    for (fault, function) in faults {
        let named = refused_for(fault);
        assert!(named == function || function.is_empty(), "{fault}: {named}");
    }
}

#[test]
fn a_compiler_is_tried_once_and_again_after_an_upgrade() {
    let folder = tempfile::tempdir().unwrap();
    let root = CacheFolder::at(folder.path().join("cache"), 1 << 30);
    let cache = Cache::of(&root);
    let command = plant(
        folder.path(),
        "compiler",
        "sed -i 's/0x1.06eba8p-3f/0x1.06eba8p-2f/' *.h",
    );
    for _ in 0..2 {
        let verdict = try_compiler(&toolchain(&command), &cache);
        let said = verdict.unwrap_err().to_string();
        assert!(
            said.contains("`erf of f32`") && said.contains(" instead of "),
            "{said}"
        );
    }
    let once = compiled(folder.path());
    let found = verdicts(&cache);
    let [verdict] = &found[..] else {
        panic!("{found:?}")
    };

    // Damage is no verdict.
    for damage in ["", "rig", "wrong erf of f32", "\0\0"] {
        fs::write(verdict, damage).unwrap();
        assert!(try_compiler(&toolchain(&command), &cache).is_err(), "{damage:?}");
    }
    assert_eq!(compiled(folder.path()), 5 * once, "tried after each damage");

    // The same version, another program.
    plant(folder.path(), "compiler", ":");
    for _ in 0..2 {
        try_compiler(&toolchain(&command), &cache).unwrap();
    }
    assert_eq!(compiled(folder.path()), 6 * once, "the upgrade is tried once");
    assert_eq!(verdicts(&cache).len(), 2);
    root.clear().unwrap();
    assert!(verdicts(&cache).is_empty(), "verdicts go with the entries");
}

#[test]
fn two_at_once_try_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let command = plant(folder.path(), "compiler", ":");
    // Two caches: processes share only the folder.
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let cache = Cache::at(folder.path().join("cache"), 1 << 30);
                try_compiler(&toolchain(&command), &cache).unwrap();
            });
        }
    });
    let both = compiled(folder.path());
    try_compiler(&toolchain(&command), &Cache::disabled()).unwrap();
    assert_eq!(compiled(folder.path()), 2 * both);
}

#[test]
fn the_next_compiler_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = plant(
        folder.path(),
        "wrong",
        "sed -i 's/0x1.06eba8p-3f/0x1.06eba8p-2f/' *.h",
    );
    let unable = plant(
        folder.path(),
        "unable",
        "echo 'error: unknown builtin' >&2; exit 1",
    );
    let right = plant(folder.path(), "right", ":");
    let accept = |toolchain: &Toolchain| try_compiler(toolchain, &Cache::disabled());
    let found = Toolchain::first_accepted(&[&wrong, &unable, &right], accept).unwrap();
    assert_eq!(found.command(), right);

    let error = Toolchain::first_accepted(&[&unable, &wrong], accept).unwrap_err();
    assert!(matches!(error, CpuError::NoCompiler { .. }), "{error}");
    let said = error.to_string();
    for part in [
        "unable",
        "unknown builtin",
        "gcc 11 and clang 13",
        "wrong",
        "`erf of f32`",
        "aot_eager",
    ] {
        assert!(said.contains(part), "{said} lacks {part}");
    }
}

/// A full disk and a compiler that was ended say nothing of the compiler.
#[test]
fn what_the_machine_does_is_no_verdict() {
    let folder = tempfile::tempdir().unwrap();
    for (name, fault, reason) in [
        (
            "full",
            "echo 'cc1: fatal error: error writing to f.s: No space left on device' >&2; exit 1",
            "No space left on device",
        ),
        ("ended", "kill -TERM $$", "signal: 15"),
    ] {
        let command = plant(folder.path(), name, fault);
        let error = try_compiler(&toolchain(&command), &Cache::disabled()).unwrap_err();
        assert!(
            matches!(error, Distrust::Untried(CpuError::Untried { .. })),
            "{error}"
        );
        let said = error.to_string();
        for part in [&command, reason, "TMPDIR"] {
            assert!(said.contains(part), "{said} lacks {part}");
        }
    }
}

/// Ctrl-C of a terminal goes to a whole group of processes. A compiler that gives it to its own group leaves
/// this process alone.
#[test]
fn compilers_are_no_part_of_the_group_that_a_terminal_interrupts() {
    let folder = tempfile::tempdir().unwrap();
    let command = plant(folder.path(), "compiler", "trap '' INT; kill -INT 0");
    try_compiler(&toolchain(&command), &Cache::disabled()).unwrap();
}
