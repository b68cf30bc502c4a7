//! Loading fills exactly what it should, saving writes what loading reads, and a misfit is reported whole.

use crate::common::*;
use burn_core as burn;
use burn_core::module::{Module, Param, ParamId};
use burn_tensor::backend::Backend;
use burn_tensor::{DType, Int, Tensor, TensorData};
use half::{bf16, f16};
use kiln_hub::*;
use safetensors::tensor::TensorView;

fn open(bytes: &[u8]) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let checkpoint = load(folder.path().to_str().unwrap()).unwrap();
    (folder, checkpoint)
}

fn values<const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert_dtype(DType::F32).to_vec().unwrap()
}

fn net() -> Net<B> {
    Net::new(&Default::default())
}

#[test]
fn every_parameter_gets_its_tensor_transposed_where_the_rule_says() {
    let (_folder, checkpoint) = open(&safetensors_of(&TORCH_SHAPES));
    let net = load_into::<B, _>(net(), &checkpoint, torch_map()).unwrap();
    let expected: Vec<f32> = (0..28).map(|i| element(0, i)).collect();
    assert_eq!(values(net.embed.weight.val()), expected);
    // [6, 4] in the file, [4, 6] in the module.
    let transposed: Vec<f32> = (0..24).map(|i| element(1, (i % 6) * 4 + i / 6)).collect();
    assert_eq!(values(net.layers[0].weight.val()), transposed);
    assert_eq!(
        values(net.norm.running_var.value()),
        (0..4).map(|i| element(7, i)).collect::<Vec<_>>()
    );
    assert_eq!(
        values(net.head.unwrap().bias.unwrap().val()),
        (0..3).map(|i| element(9, i)).collect::<Vec<_>>()
    );
}

#[test]
fn half_precision_files_fill_f32_modules_and_the_other_way_round() {
    for dtype in [Dtype::F16, Dtype::BF16, Dtype::F64] {
        let encode = |x: f32| match dtype {
            Dtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
            Dtype::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
            _ => f64::from(x).to_le_bytes().to_vec(),
        };
        let data: Vec<Vec<u8>> = TORCH_SHAPES
            .iter()
            .enumerate()
            .map(|(t, (_, shape))| {
                (0..shape.iter().product::<usize>())
                    .flat_map(|i| encode(element(t, i)))
                    .collect()
            })
            .collect();
        let views = TORCH_SHAPES
            .iter()
            .zip(&data)
            .map(|((name, shape), bytes)| (*name, TensorView::new(dtype, shape.to_vec(), bytes).unwrap()));
        let (_folder, narrow) = open(&safetensors::serialize(views, None).unwrap());
        let (_folder, wide) = open(&safetensors_of(&TORCH_SHAPES));
        let from_narrow = load_into::<B, _>(net(), &narrow, torch_map()).unwrap();
        let from_wide = load_into::<B, _>(net(), &wide, torch_map()).unwrap();
        assert_eq!(from_narrow.layers[1].weight.val().dtype(), DType::F32);
        assert_eq!(
            values(from_narrow.layers[1].weight.val()),
            values(from_wide.layers[1].weight.val())
        );

        let options = LoadOptions::new().with_dtype(DType::BF16);
        let (narrow, loaded) = load_into_with::<B, _>(net(), &wide, torch_map(), &options).unwrap();
        assert_eq!(loaded.filled, 10);
        assert_eq!(narrow.embed.weight.val().dtype(), DType::BF16);
        assert_eq!(
            values(narrow.embed.weight.val()),
            values(from_wide.embed.weight.val())
        );
    }
}

#[test]
fn loading_keeps_ids_and_gradient_flags() {
    let (_folder, checkpoint) = open(&safetensors_of(&TORCH_SHAPES));
    let mut before = net();
    before.layers[1].weight = before.layers[1].weight.clone().set_require_grad(false);
    let (frozen, id) = (before.layers[1].weight.id, before.embed.weight.id);
    let after = load_into::<B, _>(before, &checkpoint, torch_map()).unwrap();
    assert_eq!(after.layers[1].weight.id, frozen);
    assert_eq!(after.embed.weight.id, id);
    assert!(!after.layers[1].weight.val().is_require_grad());
}

#[test]
fn one_error_lists_everything_that_does_not_fit() {
    let mut shapes = TORCH_SHAPES.to_vec();
    shapes[1].0 = "mlp.0.kernel";
    shapes[3].1 = &[6, 4];
    shapes[9].1 = &[5];
    shapes.push(("optimizer.step", &[1]));
    let (_folder, checkpoint) = open(&safetensors_of(&shapes));
    let HubError::Keys(report) = load_into::<B, _>(net(), &checkpoint, torch_map()).unwrap_err() else {
        panic!("not a key report")
    };
    assert_eq!(
        report.missing,
        [MissingKey {
            param: "layers.0.weight".into(),
            key: "mlp.0.weight".into(),
            shape: vec![6, 4],
            head: false,
        }]
    );
    assert_eq!(report.unexpected, ["mlp.0.kernel", "optimizer.step"]);
    let misshapen: Vec<_> = report
        .misshapen
        .iter()
        .map(|m| (&*m.key, &m.expected[..], &m.found[..]))
        .collect();
    assert_eq!(
        misshapen,
        [
            ("mlp.2.weight", &[4, 6][..], &[6, 4][..]),
            ("classifier.bias", &[3][..], &[5][..])
        ]
    );
    let text = report.to_string();
    for name in [
        "mlp.0.weight",
        "layers.0.weight",
        "mlp.0.kernel",
        "optimizer.step",
        "[6, 4]",
        "[4, 6]",
    ] {
        assert!(text.contains(name), "{text}");
    }
}

#[test]
fn a_new_head_and_spare_keys_are_allowed_when_asked_for() {
    let mut shapes = TORCH_SHAPES.to_vec();
    (shapes[8].1, shapes[9].1) = (&[5, 4], &[5]);
    shapes.push(("bn.num_batches_tracked", &[1]));
    let (_folder, checkpoint) = open(&safetensors_of(&shapes));
    assert!(load_into::<B, _>(net(), &checkpoint, torch_map()).is_err());

    let before = net();
    let head = values(before.head.as_ref().unwrap().weight.val());
    let map = torch_map().with_ignorable(KeyPattern::Suffix(".num_batches_tracked".into()));
    let options = LoadOptions::new().with_skip("head");
    let (after, loaded) = load_into_with::<B, _>(before, &checkpoint, &map, &options).unwrap();
    assert_eq!(values(after.head.unwrap().weight.val()), head);
    assert_eq!(loaded.kept, ["head.weight", "head.bias"]);
    assert_eq!(loaded.filled, 8);

    let (_folder, without_head) = open(&safetensors_of(&TORCH_SHAPES[..8]));
    assert!(load_into::<B, _>(net(), &without_head, torch_map()).is_err());
    let options = LoadOptions::new().with_allow_missing("head");
    let (_, loaded) = load_into_with::<B, _>(net(), &without_head, torch_map(), &options).unwrap();
    assert_eq!((loaded.filled, loaded.kept.len()), (8, 2));
}

/// The map of a classifier, with its head marked as such.
fn map_with_head() -> KeyMap {
    let mut map = torch_map();
    let heads = map.rules.iter_mut().filter(|rule| rule.param.starts_with("head"));
    heads.for_each(|rule| rule.head = true);
    map
}

#[test]
fn a_head_is_random_only_if_it_may_be() {
    let mut other = TORCH_SHAPES.to_vec();
    (other[8].1, other[9].1) = (&[5, 4], &[5]);
    for (shapes, expected) in [
        (&TORCH_SHAPES[..8], "classifier.weight [3, 4]"),
        (
            &other[..],
            "classifier.weight: [5, 4], but parameter head.weight needs [3, 4]",
        ),
    ] {
        let (_folder, checkpoint) = open(&safetensors_of(shapes));
        let error = load_into::<B, _>(net(), &checkpoint, map_with_head())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(expected) && error.contains("fine-tuning"),
            "{error}"
        );

        let before = net();
        let head = values(before.head.as_ref().unwrap().weight.val());
        let options = LoadOptions::new().with_new_heads(true);
        let (after, loaded) = load_into_with::<B, _>(before, &checkpoint, map_with_head(), &options).unwrap();
        assert_eq!(values(after.head.unwrap().weight.val()), head);
        assert_eq!(loaded.new_heads, ["head.weight", "head.bias"]);
        assert_eq!(loaded.filled, 8);
    }
    // Nothing but a head may be new.
    let (_folder, checkpoint) = open(&safetensors_of(&TORCH_SHAPES[1..]));
    let options = LoadOptions::new().with_new_heads(true);
    assert!(load_into_with::<B, _>(net(), &checkpoint, map_with_head(), &options).is_err());
}

/// Weights that are tied may be stored twice, if both copies say the same.
#[test]
fn one_parameter_has_one_value() {
    let llama = |tied| {
        let config = kiln_models::llama::LlamaConfig::new(9, 8, 16, 1, 2).with_tie_word_embeddings(tied);
        let model = config.init::<B>(&Default::default());
        let map = kiln_models::keys::Pretrained::key_map(&model);
        (model, map)
    };
    let tokens = || Tensor::<B, 2, burn_tensor::Int>::from_ints([[1, 2, 3]], &Default::default());
    let folder = tempfile::tempdir().unwrap();
    let (untied, map) = llama(false);
    save_pretrained::<B, _>(&untied, map, None, folder.path()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(
        !checkpoint
            .same("lm_head.weight", "model.embed_tokens.weight")
            .unwrap()
    );
    let (tied, map) = llama(true);
    let error = load_into::<B, _>(tied, &checkpoint, map).unwrap_err().to_string();
    assert!(
        error.contains("model.embed_tokens.weight and lm_head.weight")
            && error.contains("tie_word_embeddings"),
        "{error}"
    );

    // The same tensor under both names, and under the name of the head alone.
    let (tied, map) = llama(true);
    let file = folder.path().join("tied.safetensors");
    save_safetensors::<B, _>(&tied, &map, &file, &SaveOptions::new()).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let table = tensors.tensor("model.embed_tokens.weight").unwrap();
    for both in [true, false] {
        let others = tensors.tensors().into_iter();
        let mut views: Vec<(String, TensorView)> = others
            .filter(|(name, _)| both || name != "model.embed_tokens.weight")
            .collect();
        views.push(("lm_head.weight".into(), table.clone()));
        let (_folder, checkpoint) = open(&safetensors::serialize(views, None).unwrap());
        let (fresh, map) = llama(true);
        let loaded = load_into::<B, _>(fresh, &checkpoint, map).unwrap();
        assert_eq!(
            values(loaded.forward(tokens())),
            values(tied.forward(tokens())),
            "{both}"
        );
    }
}

#[test]
fn aliases_find_tensors_under_older_names() {
    let mut shapes = TORCH_SHAPES.to_vec();
    (shapes[4].0, shapes[5].0) = ("bn.gamma", "bn.beta");
    let (_folder, checkpoint) = open(&safetensors_of(&shapes));
    let mut map = torch_map();
    for rule in &mut map.rules {
        rule.aliases = vec![
            rule.key
                .replace("bn.weight", "bn.gamma")
                .replace("bn.bias", "bn.beta"),
        ];
    }
    let net = load_into::<B, _>(net(), &checkpoint, map).unwrap();
    assert_eq!(
        values(net.norm.gamma.val()),
        (0..4).map(|i| element(4, i)).collect::<Vec<_>>()
    );
}

#[test]
fn contradictory_maps_are_refused() {
    let (_folder, checkpoint) = open(&safetensors_of(&TORCH_SHAPES));
    let mut twice = torch_map();
    twice.rules[1].key = "mlp.2.weight".into();
    assert!(matches!(
        load_into::<B, _>(net(), &checkpoint, twice),
        Err(HubError::KeyMap(_))
    ));
    let mut bent = torch_map();
    bent.rules[2].transform = Transform::Transpose;
    assert!(matches!(
        load_into::<B, _>(net(), &checkpoint, bent),
        Err(HubError::KeyMap(_))
    ));
    let mut short = torch_map();
    short.rules.pop();
    let HubError::Keys(report) = load_into::<B, _>(net(), &checkpoint, short).unwrap_err() else {
        panic!()
    };
    assert_eq!(report.unmapped, ["head.bias"]);
    assert_eq!(report.unexpected, ["classifier.bias"]);
}

#[test]
fn quantized_weights_are_not_taken_for_weights() {
    let mut header = String::from("{");
    let mut offset = 0;
    for (name, shape) in TORCH_SHAPES {
        let len = shape.iter().product::<usize>();
        header += &format!(
            r#""{name}":{{"dtype":"I8","shape":{shape:?},"data_offsets":[{offset},{}]}},"#,
            offset + len
        );
        offset += len;
    }
    header.pop();
    header.push('}');
    let (_folder, checkpoint) = open(&raw_safetensors(&header, &vec![1; offset]));
    let HubError::Keys(report) = load_into::<B, _>(net(), &checkpoint, torch_map()).unwrap_err() else {
        panic!()
    };
    assert_eq!(report.mistyped.len(), 10);
}

#[test]
fn what_is_saved_is_what_was_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let original = safetensors_of(&TORCH_SHAPES);
    let (_origin, checkpoint) = open(&original);
    let net = load_into::<B, _>(net(), &checkpoint, torch_map()).unwrap();
    save_pretrained::<B, _>(&net, torch_map(), Some(r#"{"model_type": "net"}"#), folder.path()).unwrap();
    let saved = load(folder.path().to_str().unwrap()).unwrap();
    assert_eq!(saved.config().unwrap().model_type().unwrap(), "net");
    assert_eq!(
        saved.names().collect::<Vec<_>>(),
        checkpoint.names().collect::<Vec<_>>()
    );
    for name in checkpoint.names() {
        assert_eq!(saved.stored(name), checkpoint.stored(name));
        assert_eq!(
            saved.tensor(name).unwrap().as_bytes(),
            checkpoint.tensor(name).unwrap().as_bytes(),
            "{name}"
        );
    }
    let header = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    assert!(
        String::from_utf8_lossy(&header).contains(r#""format":"pt""#),
        "transformers insists on it"
    );
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        2,
        "no temporary files are left"
    );
}

#[test]
fn shards_and_single_files_replace_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let net = net();
    let config = Some("{}");
    let sharded = SaveOptions::new()
        .with_max_shard_bytes(150)
        .with_dtype(DType::BF16);
    let count = || std::fs::read_dir(folder.path()).unwrap().count();
    for _ in 0..2 {
        save_pretrained_with::<B, _>(&net, torch_map(), config, path, &sharded).unwrap();
        let checkpoint = load(path).unwrap();
        assert!(checkpoint.files().count() > 1);
        assert_eq!(
            checkpoint.stored("mlp.0.weight").unwrap(),
            StoredTensor {
                dtype: Dtype::BF16,
                shape: vec![6, 4]
            }
        );
        assert_eq!(checkpoint.names().count(), 10);
        assert_eq!(count(), checkpoint.files().count() + 2, "shards, index, config");
        let back = load_into::<B, _>(self::net(), &checkpoint, torch_map()).unwrap();
        let rounded: Vec<f32> = values(net.layers[0].weight.val())
            .iter()
            .map(|x| bf16::from_f32(*x).to_f32())
            .collect();
        assert_eq!(values(back.layers[0].weight.val()), rounded);

        save_pretrained::<B, _>(&net, torch_map(), config, path).unwrap();
        let checkpoint = load(path).unwrap();
        assert_eq!(checkpoint.files().count(), 1);
        assert_eq!(count(), 2, "the shards of the earlier save are gone");
        let back = load_into::<B, _>(self::net(), &checkpoint, torch_map()).unwrap();
        assert_eq!(
            values(back.layers[0].weight.val()),
            values(net.layers[0].weight.val())
        );
    }
}

#[test]
fn an_identity_map_saves_and_restores_any_module() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let net = net();
    let map = KeyMap::identity::<B, _>(&net);
    save_safetensors::<B, _>(&net, &map, &path, &SaveOptions::new()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert!(checkpoint.stored("norm.running_mean").is_some());
    let other = load_into::<B, _>(self::net(), &checkpoint, &map).unwrap();
    assert_eq!(values(other.embed.weight.val()), values(net.embed.weight.val()));
    assert_eq!(
        values(other.head.unwrap().weight.val()),
        values(net.head.unwrap().weight.val())
    );
}

#[test]
fn saving_refuses_bad_configs_before_it_touches_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out");
    let result = save_pretrained::<B, _>(&net(), torch_map(), Some("{\"eps\": NaN}"), &target);
    assert!(matches!(result, Err(HubError::Config { .. })));
    let mut short = torch_map();
    short.rules.pop();
    let result = save_pretrained::<B, _>(&net(), short, None, &target);
    assert!(matches!(result, Err(HubError::Keys(_))));
    assert!(!target.exists());
}

/// Integers of several types, as Kiln holds them. Burn reads all of them as i32.
#[derive(Module, Debug)]
struct Ints<B: Backend> {
    long: Param<Tensor<B, 2, Int>>,
    byte: Param<Tensor<B, 1, Int>>,
    int: Param<Tensor<B, 1, Int>>,
}

impl<B: Backend> Ints<B> {
    fn new(device: &B::Device, long: [[i64; 3]; 2]) -> Self {
        let vector = |values: [i64; 3], dtype| {
            Param::initialized(ParamId::new(), Tensor::from_data(values, (device, dtype)))
        };
        Self {
            long: Param::initialized(ParamId::new(), Tensor::from_data(long, (device, DType::I64))),
            byte: vector([0, 7, 255], DType::U8),
            int: vector([-1, 0, i32::MAX.into()], DType::I32),
        }
    }
}

fn integers_keep_their_type<B: Backend>(device: &B::Device) {
    let folder = tempfile::tempdir().unwrap();
    let values = [[1, -2, 3], [i32::MIN.into(), 0, i32::MAX.into()]];
    let model = Ints::<B>::new(device, values);
    let mut map = KeyMap::identity(&model);
    map.rules
        .iter_mut()
        .find(|rule| rule.param == "long")
        .unwrap()
        .transform = Transform::Transpose;
    save_pretrained(&model, &map, None, folder.path()).unwrap();
    let saved = Checkpoint::open(folder.path()).unwrap();
    let stored = |name| {
        let StoredTensor { dtype, shape } = saved.stored(name).unwrap();
        (
            dtype,
            shape,
            saved.tensor(name).unwrap().iter::<i64>().collect::<Vec<_>>(),
        )
    };
    let transposed = [1, i32::MIN.into(), -2, 0, 3, i32::MAX.into()];
    assert_eq!(stored("long"), (Dtype::I64, vec![3, 2], transposed.to_vec()));
    assert_eq!(stored("byte"), (Dtype::U8, vec![3], vec![0, 7, 255]));
    assert_eq!(stored("int"), (Dtype::I32, vec![3], vec![-1, 0, i32::MAX.into()]));

    let back = load_into(Ints::<B>::new(device, [[0; 3]; 2]), &saved, &map).unwrap();
    let types = [
        back.long.val().dtype(),
        back.byte.val().dtype(),
        back.int.val().dtype(),
    ];
    assert_eq!(types, [DType::I64, DType::U8, DType::I32]);
    let read = |data: TensorData| data.iter::<i64>().collect::<Vec<_>>();
    assert_eq!(read(back.long.val().to_data()), values.concat());
    assert_eq!(read(back.byte.val().to_data()), [0, 7, 255]);
}

#[test]
fn integers_keep_their_type_and_every_file_can_be_read() {
    integers_keep_their_type::<B>(&Default::default());
    integers_keep_their_type::<kiln_burn::Kiln>(&kiln_burn::KilnDevice::cpu());
}

#[test]
fn integers_that_no_type_on_the_way_has_are_errors() {
    use kiln_burn::{Kiln, KilnDevice};
    let folder = tempfile::tempdir().unwrap();
    for far in [i64::from(i32::MAX) + 1, i64::from(i32::MIN) - 1] {
        let model = Ints::<Kiln>::new(&KilnDevice::cpu(), [[1, 2, far], [0; 3]]);
        let path = folder.path().join("kiln.safetensors");
        let map = KeyMap::identity(&model);
        let error = save_safetensors(&model, map, &path, &SaveOptions::new()).unwrap_err();
        assert!(
            matches!(&error, HubError::DType { name, .. } if name == "long"),
            "{error}"
        );
        assert!(!path.exists());

        // This backend hands them out, and a parameter of a smaller type does not take them.
        let model = Ints::<B>::new(&Default::default(), [[1, 2, far], [0; 3]]);
        let path = folder.path().join("flex.safetensors");
        let map = KeyMap::identity(&model);
        save_safetensors(&model, &map, &path, &SaveOptions::new()).unwrap();
        let saved = Checkpoint::open(&path).unwrap();
        let mut narrow = Ints::<B>::new(&Default::default(), [[0; 3]; 2]);
        narrow.long = narrow.long.map(|tensor| tensor.cast(DType::I32));
        let error = load_into(narrow, &saved, &map).unwrap_err();
        assert!(
            matches!(&error, HubError::DType { name, .. } if name == "long"),
            "{error}"
        );
        let back = load_into(Ints::<B>::new(&Default::default(), [[0; 3]; 2]), &saved, &map).unwrap();
        assert_eq!(back.long.val().to_data().to_vec::<i64>().unwrap()[2], far);
    }
}

/// Burn reads all floats of Kiln's tensors as f32.
#[test]
fn floats_that_arrive_with_fewer_digits_are_not_saved_as_f64() {
    use kiln_burn::{Kiln, KilnDevice};
    let model = burn_nn::LinearConfig::new(2, 2)
        .with_bias(false)
        .init::<Kiln>(&KilnDevice::cpu());
    let values: Vec<u8> = (0..4).flat_map(|i| (f64::from(i) / 3.0).to_le_bytes()).collect();
    let header = r#"{"weight":{"dtype":"F64","shape":[2,2],"data_offsets":[0,32]}}"#;
    let (_folder, checkpoint) = open(&raw_safetensors(header, &values));
    let map = KeyMap::identity(&model);
    let options = LoadOptions::new().with_dtype(DType::F64);
    let (model, _) = load_into_with::<Kiln, _>(model, &checkpoint, map.clone(), &options).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let error = save_pretrained::<Kiln, _>(&model, map.clone(), None, folder.path()).unwrap_err();
    assert!(matches!(error, HubError::DType { .. }), "{error}");
    assert!(error.to_string().contains("with_dtype"), "{error}");
    assert!(!folder.path().join("model.safetensors").exists());
    let narrower = SaveOptions::new().with_dtype(DType::F32);
    save_pretrained_with::<Kiln, _>(&model, map, None, folder.path(), &narrower).unwrap();
    let saved = Checkpoint::open(folder.path().join("model.safetensors")).unwrap();
    let thirds = [0.0, 1.0 / 3.0, 2.0 / 3.0, 1.0];
    assert_eq!(saved.tensor("weight").unwrap().to_vec::<f32>().unwrap(), thirds);
}
