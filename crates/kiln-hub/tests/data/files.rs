//! Files that tests write, and damaged ones.

use std::path::{Path, PathBuf};

use kiln_hub::data::*;
use proptest::prelude::*;

pub fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn a_saved_stream_reads_back(
        tokens in prop_oneof![
            prop::collection::vec(0u32..65536, 0..50),
            prop::collection::vec(any::<u32>(), 0..50),
        ],
        from in 0usize..60, to in 0usize..60,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let stream = TokenStream::from_tokens(tokens.clone());
        stream.save(&path).unwrap();
        let mapped = TokenStream::open(&path).unwrap();
        prop_assert_eq!(mapped.read(0..tokens.len()), tokens.clone());
        prop_assert_eq!(mapped.read(from..to), stream.read(from..to));
        prop_assert_eq!(mapped.max_token(), stream.max_token());
    }

    #[test]
    fn damaged_data_files_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
        cut in prop::option::of(any::<prop::sample::Index>()),
        which in 0usize..5,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = match which {
            0 => {
                let path = folder.path().join("x");
                TokenStream::from_tokens((0..20).collect()).save(&path).unwrap();
                std::fs::read(path).unwrap()
            }
            1 => [vec![3u8; 3073], vec![9; 3073]].concat(),
            2 => png(4, 3, |x, y| [x as u8, y as u8, 7]),
            3 => b"{\"text\": \"a\", \"label\": 1}\n{\"text\": \"b\", \"label\": \"x\"}\n".to_vec(),
            _ => b"text,label\n\"a, \"\"b\"\"\",1\nc,2\n".to_vec(),
        };
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let path = write(folder.path(), "test_batch.bin", &bytes);
        match which {
            0 => { let _ = TokenStream::open(&path).map(|stream| stream.read(0..stream.len())); }
            1 => { let _ = Cifar::open(folder.path(), CifarKind::Cifar10, false).map(|c| c.picture(0)); }
            2 => { let _ = Picture::open(&path); }
            3 => { let _ = TextExamples::from_jsonl(&path, &TextFields::default()); }
            _ => { let _ = TextExamples::from_csv(&path, &TextFields::default()); }
        }
    }
}

pub fn png(width: u32, height: u32, colour: impl Fn(u32, u32) -> [u8; 3]) -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    let picture = image::RgbImage::from_fn(width, height, |x, y| image::Rgb(colour(x, y)));
    picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}
