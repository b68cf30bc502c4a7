//! Running statistics in files: what a training step has just computed, not what was before it.

use burn_autodiff::Autodiff;
use burn_core::module::AutodiffModule;
use burn_tensor::{DType, Distribution, Tensor};
use kiln_hub::*;

use crate::common::*;

type Ad = Autodiff<B>;

/// The layer's own statistics after `valid()`: mean and variance.
fn current(net: &Net<Ad>) -> [Vec<f32>; 2] {
    let norm = net.valid().norm;
    [norm.running_mean, norm.running_var].map(|state| state.value().into_data().to_vec().unwrap())
}

fn stored(checkpoint: &Checkpoint) -> [Vec<f32>; 2] {
    ["bn.running_mean", "bn.running_var"]
        .map(|name| checkpoint.tensor_as(name, DType::F32).unwrap().to_vec().unwrap())
}

fn train(net: &Net<Ad>, steps: usize) {
    for _ in 0..steps {
        let input = Tensor::<Ad, 2>::random([5, 4], Distribution::Normal(3.0, 2.0), &Default::default());
        net.norm.forward(input.unsqueeze_dims::<4>(&[-1, -1]));
    }
}

#[test]
fn saved_statistics_are_those_of_the_newest_step() {
    for steps in [0, 1, 3] {
        let net = Net::<Ad>::new(&Default::default());
        train(&net, steps);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("net.safetensors");
        save_safetensors(&net, torch_map(), &file, &SaveOptions::new()).unwrap();
        save_pretrained(&net, torch_map(), None, folder.path().join("pretrained")).unwrap();
        for path in [file, folder.path().join("pretrained")] {
            assert_eq!(
                stored(&Checkpoint::open(path).unwrap()),
                current(&net),
                "{steps} steps"
            );
        }
        if steps > 0 {
            assert!(current(&net)[0].iter().all(|mean| *mean != 0.0));
        }
    }
}

/// A save between two steps changes neither.
#[test]
fn saving_leaves_training_as_it_is() {
    let inputs: Vec<Tensor<Ad, 4>> = (0..3)
        .map(|_| Tensor::random([5, 4, 1, 1], Distribution::Normal(1.0, 2.0), &Default::default()))
        .collect();
    let run = |save: bool| {
        let net = Net::<Ad>::new(&Default::default());
        for input in &inputs {
            net.norm.forward(input.clone());
            if save {
                let folder = tempfile::tempdir().unwrap();
                save_pretrained(&net, torch_map(), None, folder.path()).unwrap();
            }
        }
        current(&net)
    };
    assert_eq!(run(true), run(false));
}

/// A statistic that waits for the next step must not come back after weights were loaded.
#[test]
fn loaded_statistics_stay() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, safetensors_of(&TORCH_SHAPES)).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let net = Net::<Ad>::new(&Default::default());
    train(&net, 2);
    let net = load_into(net, &checkpoint, torch_map()).unwrap();
    assert_eq!(current(&net), stored(&checkpoint));
}
