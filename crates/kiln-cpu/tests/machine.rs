//! The machine's rates are measured once.

use kiln_cpu::{Cache, Toolchain, rates};
use kiln_partition::Machine;
use kiln_store::CacheFolder;

#[test]
fn rates_are_measured_once() {
    let folder = tempfile::tempdir().unwrap();
    let root = CacheFolder::at(folder.path(), 1 << 30);
    let cache = Cache::of(&root);
    let toolchain = Toolchain::detect().unwrap();
    let first = rates(&toolchain, &cache, 2);
    assert_eq!(rates(&toolchain, &cache, 2), first);
    let found = |machine: &Machine| {
        [
            machine.bytes_per_second,
            machine.flops_per_second,
            machine.bf16_flops_per_second,
            machine.simple_per_second,
            machine.special_per_second,
            machine.random_per_second,
        ]
    };
    // All rates are plausible, and they differ from the defaults that replace failed measurements.
    for (rate, reference) in found(&first).into_iter().zip(found(&Machine::default())) {
        assert!((1e6..1e16).contains(&rate), "{first:?}");
        assert!(rate > reference / 1e4 && rate < reference * 1e4, "{first:?}");
    }
    assert_ne!(first, Machine::default());
    assert!(
        root.list().unwrap().iter().all(|store| store.entries.is_empty()),
        "the step that measures is no entry"
    );
    root.clear().unwrap();
    let left = std::fs::read_dir(cache.folder().unwrap()).unwrap();
    assert_eq!(
        left.filter(|file| file.is_ok()).count(),
        0,
        "notes go with the entries"
    );
}
