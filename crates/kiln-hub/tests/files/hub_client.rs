//! The hub's client against an endpoint on this machine: download, cache, resume, shards, refusals, offline.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::common::*;
use kiln_hub::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the endpoint serves and how it behaves.
#[derive(Default)]
struct Served {
    files: HashMap<String, Vec<u8>>,
    commit: String,
    token: Option<String>,
    /// Number of coming transfers that break after half of the bytes.
    break_transfers: usize,
    /// Serves this many bytes less than announced, for ever.
    shorten: bool,
    etag: Option<String>,
    /// Sends clients elsewhere for the weights, as the hub does for large files.
    redirect: Option<String>,
    /// Every request: path and the first byte asked for.
    log: Vec<(String, Option<u64>)>,
}

/// An endpoint with the hub's two kinds of pages, one thread a connection.
struct Endpoint {
    address: String,
    served: Arc<Mutex<Served>>,
}

impl Endpoint {
    fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = files
            .iter()
            .map(|(name, bytes)| (name.to_string(), bytes.clone()))
            .collect();
        let served = Arc::new(Mutex::new(Served {
            files,
            commit: COMMIT.into(),
            ..Default::default()
        }));
        let shared = served.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                std::thread::spawn(move || while answer(&stream, &shared).unwrap_or(false) {});
            }
        });
        Self { address, served }
    }

    fn set(&self, change: impl FnOnce(&mut Served)) {
        change(&mut self.served.lock().unwrap());
    }

    /// Transfers of a file that began at each byte, probes of one byte left out.
    fn requests(&self, part: &str) -> Vec<u64> {
        let served = self.served.lock().unwrap();
        served
            .log
            .iter()
            .filter(|(path, _)| path.contains(part))
            .map(|(_, from)| from.unwrap_or(0))
            .collect()
    }
}

/// Answers one request; `false` ends the connection.
fn answer(stream: &TcpStream, shared: &Mutex<Served>) -> std::io::Result<bool> {
    let mut reader = BufReader::new(stream);
    let (mut line, mut range, mut token) = (String::new(), None, None);
    if reader.read_line(&mut line)? == 0 {
        return Ok(false);
    }
    let path = line.split(' ').nth(1).unwrap_or("").to_string();
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header)? <= 2 {
            break;
        }
        let (name, value) = header.split_once(':').unwrap_or((&header, ""));
        match name.to_lowercase().as_str() {
            "range" => range = value.trim().strip_prefix("bytes=").map(str::to_string),
            "authorization" => token = Some(value.trim().to_string()),
            _ => {}
        }
    }
    let mut served = shared.lock().unwrap();
    let mut out = stream;
    let plain = |mut out: &TcpStream, status: &str, body: &str| {
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nX-Repo-Commit: {COMMIT}\r\n\r\n",
            body.len()
        );
        out.write_all(head.as_bytes())
            .and_then(|()| out.write_all(body.as_bytes()))
            .map(|()| true)
    };
    if served
        .token
        .as_ref()
        .is_some_and(|wanted| token != Some(format!("Bearer {wanted}")))
    {
        return plain(out, "401 Unauthorized", "{}");
    }
    if path.starts_with("/api/models/owner/model/revision/") {
        let revision = path.rsplit('/').next().unwrap_or("");
        if !["main", "v1.0", COMMIT].contains(&revision) {
            return plain(out, "404 Not Found", "{}");
        }
        let mut names: Vec<_> = served
            .files
            .keys()
            .map(|name| format!(r#"{{"rfilename":{name:?}}}"#))
            .collect();
        names.sort();
        let body = format!(
            r#"{{"sha":"{}","siblings":[{}],"private":false}}"#,
            served.commit,
            names.join(",")
        );
        return plain(out, "200 OK", &body);
    }
    let prefix = format!("/owner/model/resolve/{}/", served.commit);
    if let Some(elsewhere) = &served.redirect
        && path.starts_with(&prefix)
        && path.ends_with("model.safetensors")
    {
        let head = format!(
            "HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: {elsewhere}/large/model.safetensors\r\n\
             X-Linked-ETag: \"linked\"\r\nX-Repo-Commit: {}\r\n\r\n",
            served.commit
        );
        return out.write_all(head.as_bytes()).map(|()| true);
    }
    let name = path
        .strip_prefix(&prefix)
        .or_else(|| path.strip_prefix("/large/"));
    let Some(bytes) = name.and_then(|name| served.files.get(name)).cloned() else {
        return plain(out, "404 Not Found", "");
    };
    let (from, to) = match range.as_deref().and_then(|r| r.split_once('-')) {
        Some((from, to)) => (from.parse().unwrap_or(0), to.parse().unwrap_or(bytes.len() - 1)),
        None => (0, bytes.len() - 1),
    };
    let probe = to == 0;
    if !probe {
        served.log.push((path.clone(), Some(from as u64)));
    }
    let mut body = bytes.get(from..=to.min(bytes.len() - 1)).unwrap_or(&[]).to_vec();
    if served.shorten && !probe {
        body.truncate(body.len() / 2);
    }
    let digest = bytes.iter().fold(bytes.len() as u64, |hash, &b| {
        hash.wrapping_mul(0x100000001b3) ^ u64::from(b)
    });
    let etag = served.etag.clone().unwrap_or_else(|| format!("{digest:x}"));
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{to}/{}\r\nETag: \"{etag}\"\r\n\
         X-Repo-Commit: {}\r\n\r\n",
        body.len(),
        bytes.len(),
        served.commit
    );
    out.write_all(head.as_bytes())?;
    if !probe && served.break_transfers > 0 {
        served.break_transfers -= 1;
        out.write_all(&body[..body.len() / 2])?;
        out.flush()?;
        stream.shutdown(std::net::Shutdown::Both)?;
        return Ok(false);
    }
    out.write_all(&body)?;
    Ok(true)
}

fn model_files() -> Vec<(&'static str, Vec<u8>)> {
    let tokenizer = tempfile::tempdir().unwrap();
    let path = tokenizer.path().join("tokenizer.json");
    Tokenizer::bytes().unwrap().save(&path).unwrap();
    vec![
        ("config.json", br#"{"model_type":"net","hidden_size":4}"#.to_vec()),
        ("tokenizer.json", std::fs::read(&path).unwrap()),
        ("model.safetensors", safetensors_of(&TORCH_SHAPES)),
        ("README.md", b"not needed".to_vec()),
    ]
}

fn hub(endpoint: &Endpoint, cache: &tempfile::TempDir) -> Hub {
    Hub::new(cache.path())
        .with_endpoint(&endpoint.address)
        .with_retries(0)
}

#[test]
fn a_repository_loads_once_and_then_from_the_cache() {
    let endpoint = Endpoint::new(&model_files());
    let cache = tempfile::tempdir().unwrap();
    let checkpoint = hub(&endpoint, &cache).load("owner/model").unwrap();
    assert_eq!(checkpoint.names().count(), TORCH_SHAPES.len());
    assert_eq!(
        checkpoint
            .config()
            .unwrap()
            .required::<usize>("hidden_size")
            .unwrap(),
        4
    );
    assert_eq!(checkpoint.tokenizer().unwrap().vocabulary(), 257);
    assert_eq!(checkpoint.place(), "owner/model@main");
    assert!(
        endpoint.requests("README").is_empty(),
        "only what is needed is fetched"
    );
    load_into::<B, _>(Net::<B>::new(&Default::default()), &checkpoint, torch_map()).unwrap();

    // The layout that all clients share.
    let folder = cache.path().join("models--owner--model");
    assert_eq!(std::fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    let link = folder.join("snapshots").join(COMMIT).join("model.safetensors");
    assert_eq!(checkpoint.files().collect::<Vec<_>>(), [link.as_path()]);
    assert!(
        std::fs::canonicalize(&link)
            .unwrap()
            .starts_with(std::fs::canonicalize(folder.join("blobs")).unwrap())
    );

    hub(&endpoint, &cache).load("owner/model").unwrap();
    assert_eq!(endpoint.requests("model.safetensors").len(), 1);
    let offline = hub(&endpoint, &cache)
        .with_offline(true)
        .load("owner/model")
        .unwrap();
    assert_eq!(offline.names().count(), TORCH_SHAPES.len());
    // A dead endpoint is like offline mode once the files are there.
    let dead = Hub::new(cache.path())
        .with_endpoint("http://127.0.0.1:9")
        .load("owner/model")
        .unwrap();
    assert_eq!(dead.folder(), checkpoint.folder());
}

#[test]
fn a_moved_branch_is_fetched_again_and_a_commit_stays() {
    let endpoint = Endpoint::new(&model_files());
    let cache = tempfile::tempdir().unwrap();
    hub(&endpoint, &cache).load("owner/model").unwrap();
    let moved = "f".repeat(40);
    endpoint.set(|served| {
        served.commit = moved.clone();
        served.files.insert(
            "config.json".into(),
            br#"{"model_type":"net","hidden_size":8}"#.to_vec(),
        );
    });
    let config = |hub: Hub| {
        hub.load("owner/model")
            .unwrap()
            .config()
            .unwrap()
            .required::<usize>("hidden_size")
            .unwrap()
    };
    assert_eq!(config(hub(&endpoint, &cache)), 8);
    assert_eq!(config(hub(&endpoint, &cache).with_offline(true)), 8);
    assert_eq!(
        config(hub(&endpoint, &cache).with_offline(true).with_revision(COMMIT)),
        4
    );
    let tag = hub(&endpoint, &cache)
        .with_revision("v1.0")
        .load("owner/model")
        .unwrap();
    assert_eq!(tag.place(), "owner/model@v1.0");
}

#[test]
fn a_broken_transfer_is_taken_up_where_it_ended() {
    let endpoint = Endpoint::new(&model_files());
    let cache = tempfile::tempdir().unwrap();
    // Two whole side files first, then the weights break.
    let snapshot_hub = hub(&endpoint, &cache);
    let snapshot = snapshot_hub.snapshot("owner/model").unwrap();
    endpoint.set(|served| served.break_transfers = 1);
    let error = snapshot.fetch("model.safetensors").unwrap_err();
    assert!(matches!(error, HubError::Download { .. }), "{error}");
    assert!(!snapshot.folder().join("model.safetensors").exists());

    let checkpoint = hub(&endpoint, &cache).load("owner/model").unwrap();
    assert_eq!(checkpoint.names().count(), TORCH_SHAPES.len());
    let starts = endpoint.requests("model.safetensors");
    let half = safetensors_of(&TORCH_SHAPES).len() as u64 / 2;
    assert_eq!(starts, [0, half], "the second transfer asks for the rest only");
    let path = checkpoint.files().next().unwrap();
    assert_eq!(std::fs::read(path).unwrap(), safetensors_of(&TORCH_SHAPES));
}

#[test]
fn retries_finish_a_transfer_that_breaks_twice() {
    let endpoint = Endpoint::new(&model_files());
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&endpoint, &cache).with_retries(3);
    let snapshot = hub.snapshot("owner/model").unwrap();
    endpoint.set(|served| served.break_transfers = 1);
    let path = snapshot.fetch("model.safetensors").unwrap();
    assert_eq!(std::fs::read(path).unwrap(), safetensors_of(&TORCH_SHAPES));
}

#[test]
fn a_short_file_is_noticed_and_removed() {
    let endpoint = Endpoint::new(&model_files());
    let cache = tempfile::tempdir().unwrap();
    endpoint.set(|served| served.shorten = true);
    let error = hub(&endpoint, &cache).load("owner/model").unwrap_err();
    assert!(matches!(error, HubError::Incomplete { .. }), "{error}");
    endpoint.set(|served| served.shorten = false);
    hub(&endpoint, &cache).load("owner/model").unwrap();
}

#[test]
fn large_files_come_from_where_the_endpoint_says() {
    let endpoint = Endpoint::new(&model_files());
    let storage = Endpoint::new(&model_files());
    let cache = tempfile::tempdir().unwrap();
    endpoint.set(|served| served.redirect = Some(storage.address.clone()));
    let checkpoint = hub(&endpoint, &cache).load("owner/model").unwrap();
    assert_eq!(storage.requests("large/model.safetensors"), [0]);
    let blob = std::fs::canonicalize(checkpoint.files().next().unwrap()).unwrap();
    assert_eq!(
        blob.file_name().unwrap(),
        "linked",
        "the name is that of the content, not of the place"
    );
}

#[test]
fn shards_are_fetched_through_their_index() {
    let index = r#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"sub/model-00002-of-00002.safetensors"}}"#;
    let endpoint = Endpoint::new(&[
        ("model.safetensors.index.json", index.as_bytes().to_vec()),
        ("model-00001-of-00002.safetensors", safetensors_of(&[("a", &[2])])),
        (
            "sub/model-00002-of-00002.safetensors",
            safetensors_of(&[("b", &[3])]),
        ),
    ]);
    let cache = tempfile::tempdir().unwrap();
    let checkpoint = hub(&endpoint, &cache).load("owner/model").unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(checkpoint.files().count(), 2);
    assert!(matches!(checkpoint.config(), Err(HubError::MissingFile { .. })));

    let bad = r#"{"weight_map":{"a":"../../../../etc/passwd"}}"#;
    let endpoint = Endpoint::new(&[("model.safetensors.index.json", bad.as_bytes().to_vec())]);
    let cache = tempfile::tempdir().unwrap();
    assert!(matches!(
        hub(&endpoint, &cache).load("owner/model"),
        Err(HubError::UnsafePath { .. })
    ));
}

#[test]
fn refusals_say_what_to_do() {
    let endpoint = Endpoint::new(&model_files());
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&endpoint, &cache);
    assert!(matches!(
        hub.load("owner/other"),
        Err(HubError::UnknownRepository { .. })
    ));
    assert!(matches!(
        hub.clone().with_revision("v9").load("owner/model"),
        Err(HubError::UnknownRepository { .. })
    ));
    assert!(matches!(
        hub.clone().with_revision("../x").load("owner/model"),
        Err(HubError::UnsafePath { .. })
    ));
    let snapshot = hub.snapshot("owner/model").unwrap();
    assert!(matches!(
        snapshot.fetch("absent.json"),
        Err(HubError::MissingFile { .. })
    ));
    assert!(matches!(
        snapshot.fetch("../../x"),
        Err(HubError::UnsafePath { .. })
    ));
    let offline = hub
        .clone()
        .with_offline(true)
        .with_revision("v9")
        .load("owner/model");
    assert!(matches!(offline, Err(HubError::NotCached { .. })));
    let dead = Hub::new(cache.path())
        .with_endpoint("http://127.0.0.1:9")
        .load("owner/unseen");
    assert!(matches!(dead, Err(HubError::Download { .. })), "{dead:?}");

    endpoint.set(|served| served.token = Some("hf_secret".into()));
    let error = hub.load("owner/model").unwrap_err();
    assert!(
        matches!(
            error,
            HubError::AccessDenied {
                status: 401,
                had_token: false,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("HF_TOKEN"));
    let wrong = hub
        .clone()
        .with_token(Some("hf_other".into()))
        .load("owner/model")
        .unwrap_err();
    assert!(matches!(wrong, HubError::AccessDenied { had_token: true, .. }));
    assert!(!wrong.to_string().contains("hf_other"));
    hub.with_token(Some("hf_secret".into()))
        .load("owner/model")
        .unwrap();
}

#[test]
fn an_endpoint_cannot_name_files_outside_the_cache() {
    let endpoint = Endpoint::new(&model_files());
    let cache = tempfile::tempdir().unwrap();
    endpoint.set(|served| served.etag = Some("../../../escaped".into()));
    assert!(matches!(
        hub(&endpoint, &cache).load("owner/model"),
        Err(HubError::Download { .. })
    ));
    assert!(!cache.path().join("escaped").exists());
    endpoint.set(|served| {
        served.etag = None;
        served.commit = "../../escaped".into();
    });
    assert!(matches!(
        hub(&endpoint, &cache).load("owner/model"),
        Err(HubError::Download { .. })
    ));
    endpoint.set(|served| {
        served.commit = COMMIT.into();
        served.files.insert("../up.json".into(), vec![1]);
    });
    let hub = hub(&endpoint, &cache);
    assert!(
        !hub.snapshot("owner/model")
            .unwrap()
            .files()
            .iter()
            .any(|name| name.contains("up.json"))
    );
}
