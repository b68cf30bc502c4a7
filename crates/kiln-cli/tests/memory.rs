//! What an eager step keeps. A program of its own: the tensors of a process are counted together.

use kiln::KilnDevice;
use kiln_cli::bench::Subject;
use kiln_cli::memory::kept_by_autograd;

#[test]
fn accumulated_batches_are_kept_together() {
    let device = KilnDevice::cpu();
    let subject = Subject::new("mlp", 4, 1, 1).unwrap();
    let kept = |count: usize| {
        let batches: Vec<_> = (0..count).map(|_| subject.batch(&device)).collect();
        kept_by_autograd(&subject.architecture, batches.clone(), &device).unwrap()
    };
    let (one, three) = (kept(1), kept(3));
    assert!(one > 0 && three > 2 * one, "{one} {three}");
    assert_eq!(kept(0), 0);
}
