//! The Hugging Face hub and its cache.
//!
//! A repository's files live in the cache in the layout that all of the hub's clients share, so a model that
//! Python has downloaded is not downloaded again:
//!
//! ```text
//! models--owner--name/blobs/<etag>                 the bytes
//! models--owner--name/snapshots/<commit>/<file>    links to them
//! models--owner--name/refs/<revision>              the commit a branch or tag stood at
//! ```
//!
//! [`Hub::snapshot`] asks the endpoint once what commit the revision stands at and which files it has, and
//! then takes every file from that commit: a push between two shards cannot mix two models. hf-hub does the
//! transfers (with resume and retries); this file adds what it leaves to its callers: offline mode, the cache
//! as a fallback when the network is down, whether a revision has moved, checks on names and lengths, and
//! errors that say what to do.

use std::fmt;
use std::path::{Path, PathBuf};

use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use indicatif::{ProgressBar, ProgressStyle};

use crate::error::HubError;
use crate::names::{is_identifier, is_plain_relative, is_repository, join_checked};

/// How to reach the hub. Starts from the environment or from nothing; every setting can be replaced.
#[derive(Clone)]
pub struct Hub {
    endpoint: String,
    cache: PathBuf,
    token: Option<String>,
    revision: String,
    offline: bool,
    progress: bool,
    retries: usize,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "(set)"))
            .field("revision", &self.revision)
            .field("offline", &self.offline)
            .field("progress", &self.progress)
            .field("retries", &self.retries)
            .finish()
    }
}

impl Hub {
    /// The public hub with a cache folder, no token, and nothing read from the environment.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self {
            endpoint: "https://huggingface.co".to_string(),
            cache: cache.into(),
            token: None,
            revision: "main".to_string(),
            offline: false,
            progress: false,
            retries: 3,
        }
    }

    /// The hub as the environment describes it, as for Python's client.
    ///
    /// `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`; `HF_ENDPOINT`; `HF_TOKEN`, else
    /// the file `token` that `hf auth login` writes; `HF_HUB_OFFLINE`; `HF_HUB_DISABLE_PROGRESS_BARS`.
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
    }

    fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let flag = |name| var(name).is_some_and(|v| ["1", "on", "yes", "true"].contains(&&*v.to_lowercase()));
        let home = var("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = var("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache")));
            cache.map(|cache| cache.join("huggingface"))
        });
        // Without a home folder there is no place that lasts; one under the working folder is at least
        // visible.
        let home = home.unwrap_or_else(|| PathBuf::from(".huggingface"));
        let mut hub = Self::new(var("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from));
        if let Some(endpoint) = var("HF_ENDPOINT") {
            hub = hub.with_endpoint(endpoint);
        }
        let token_file = var("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
        hub.token = var("HF_TOKEN").or_else(|| std::fs::read_to_string(token_file).ok());
        hub.token = hub
            .token
            .map(|token| token.trim().to_string())
            .filter(|token| !token.is_empty());
        hub.offline = flag("HF_HUB_OFFLINE");
        hub.progress = !flag("HF_HUB_DISABLE_PROGRESS_BARS");
        hub
    }

    /// Asks another server, such as a mirror.
    pub fn with_endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = endpoint.into().trim_end_matches('/').to_string();
        self
    }

    /// Sends a token, or none.
    pub fn with_token(mut self, token: Option<String>) -> Self {
        self.token = token;
        self
    }

    /// Takes a branch, tag or commit other than `main`.
    pub fn with_revision(mut self, revision: impl Into<String>) -> Self {
        self.revision = revision.into();
        self
    }

    /// Never uses the network.
    pub fn with_offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// Shows a progress bar for each download, on standard error and only if that is a terminal.
    pub fn with_progress(mut self, progress: bool) -> Self {
        self.progress = progress;
        self
    }

    /// How often a broken transfer is taken up again before it is an error.
    pub fn with_retries(mut self, retries: usize) -> Self {
        self.retries = retries;
        self
    }

    /// Looks up a repository: its commit and its files. Downloads nothing yet.
    ///
    /// Offline, or if the endpoint cannot be reached, the answer is what the cache has of the revision.
    ///
    /// # Errors
    /// [`HubError::NotFound`] for a name that no repository can have, [`HubError::UnknownRepository`],
    /// [`HubError::AccessDenied`], [`HubError::NotCached`], [`HubError::Download`].
    pub fn snapshot(&self, repository: &str) -> Result<Snapshot<'_>, HubError> {
        if !is_repository(repository) {
            return Err(HubError::NotFound {
                name: repository.to_string(),
            });
        }
        if !is_plain_relative(&self.revision) {
            return Err(HubError::UnsafePath {
                origin: "the revision".into(),
                name: self.revision.clone(),
            });
        }
        if self.offline {
            return self.cached_snapshot(repository, "offline mode is on");
        }
        match self.ask(repository) {
            Ok(snapshot) => Ok(snapshot),
            Err(Asked::Refused(error)) => Err(error),
            Err(Asked::Unreachable(error)) => {
                let why = format!("{} cannot be reached", self.endpoint);
                let Ok(snapshot) = self.cached_snapshot(repository, &why) else {
                    return Err(error);
                };
                kiln_log::warn!(repository, %error, "using the cached files");
                Ok(snapshot)
            }
        }
    }

    /// Asks the endpoint for the revision's commit and files.
    fn ask(&self, repository: &str) -> Result<Snapshot<'_>, Asked> {
        let download = |reason: String| HubError::Download {
            endpoint: self.endpoint.clone(),
            repo: repository.to_string(),
            file: "the list of files".to_string(),
            reason,
        };
        let api = self
            .api()
            .map_err(|error| Asked::Refused(download(error.to_string())))?;
        let named = Repo::with_revision(repository.to_string(), RepoType::Model, self.revision.clone());
        let info = match api.repo(named.clone()).info() {
            Ok(info) => info,
            Err(error) => {
                let answered = status(&error).filter(|status| *status < 500);
                let explained = self.explain(&error, repository, "the list of files");
                return Err(if answered.is_some() {
                    Asked::Refused(explained)
                } else {
                    Asked::Unreachable(explained)
                });
            }
        };
        if !is_identifier(&info.sha) {
            return Err(Asked::Refused(download(format!(
                "it names the commit `{}`",
                info.sha
            ))));
        }
        // Names that would leave the folder cannot be asked for: they are not in the list.
        let files = info
            .siblings
            .into_iter()
            .map(|s| s.rfilename)
            .filter(|name| is_plain_relative(name))
            .collect();
        let pinned = Repo::with_revision(repository.to_string(), RepoType::Model, info.sha.clone());
        let cache = Cache::new(self.cache.clone());
        if self.revision != info.sha {
            // Offline mode will read this reference. A cache that cannot be written is reported by the
            // first download.
            if let Err(error) = cache.repo(named).create_ref(&info.sha) {
                tracing::debug!(%error, "cannot note the revision in the cache");
            }
        }
        Ok(Snapshot {
            hub: self,
            repository: repository.to_string(),
            folder: cache.repo(pinned.clone()).pointer_path(&info.sha),
            files,
            remote: Some(api.repo(pinned)),
            offline_because: String::new(),
        })
    }

    /// The part of the revision that is in the cache.
    fn cached_snapshot(&self, repository: &str, why: &str) -> Result<Snapshot<'_>, HubError> {
        let folder = self
            .cache
            .join(format!("models--{}", repository.replace('/', "--")));
        let commit = match std::fs::read_to_string(folder.join("refs").join(&self.revision)) {
            Ok(commit) => Some(commit.trim().to_string()),
            Err(_) => Some(self.revision.clone()).filter(|revision| is_identifier(revision)),
        };
        let snapshot = commit
            .filter(|c| is_identifier(c))
            .map(|commit| folder.join("snapshots").join(commit));
        match snapshot.filter(|path| path.is_dir()) {
            Some(folder) => Ok(Snapshot {
                hub: self,
                repository: repository.to_string(),
                files: list_files(&folder),
                folder,
                remote: None,
                offline_because: why.to_string(),
            }),
            None => Err(self.not_cached(repository, "the revision is", why)),
        }
    }

    fn not_cached(&self, repository: &str, what: &str, why: &str) -> HubError {
        HubError::NotCached {
            repo: repository.to_string(),
            revision: self.revision.clone(),
            what: what.to_string(),
            cache: self.cache.clone(),
            why: why.to_string(),
        }
    }

    fn api(&self) -> Result<Api, ApiError> {
        ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_progress(false)
            .with_retries(self.retries)
            .with_user_agent("kiln", env!("CARGO_PKG_VERSION"))
            .build()
    }

    /// An error of the transfer library in the caller's terms.
    fn explain(&self, error: &ApiError, repository: &str, file: &str) -> HubError {
        let (endpoint, repo) = (self.endpoint.clone(), repository.to_string());
        match status(error) {
            Some(404) => HubError::UnknownRepository {
                endpoint,
                repo,
                revision: self.revision.clone(),
            },
            Some(status @ (401 | 403)) => HubError::AccessDenied {
                endpoint,
                repo,
                status,
                had_token: self.token.is_some(),
            },
            _ => HubError::Download {
                endpoint,
                repo,
                file: file.to_string(),
                reason: error.to_string(),
            },
        }
    }
}

/// Why there is no answer.
enum Asked {
    /// The endpoint answered, and its answer is no.
    Refused(HubError),
    /// There was no usable answer.
    Unreachable(HubError),
}

/// The HTTP status inside an error, if the server answered at all.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match error.as_ref() {
            ureq::Error::StatusCode(status) => Some(*status),
            _ => None,
        },
        ApiError::TooManyRetries(inner) => status(inner),
        _ => None,
    }
}

/// A repository at one commit.
pub struct Snapshot<'a> {
    hub: &'a Hub,
    repository: String,
    folder: PathBuf,
    files: Vec<String>,
    remote: Option<ApiRepo>,
    offline_because: String,
}

impl fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("repository", &self.repository)
            .field("folder", &self.folder)
            .finish()
    }
}

impl Snapshot<'_> {
    /// `owner/name@revision`, for messages.
    pub fn place(&self) -> String {
        format!("{}@{}", self.repository, self.hub.revision)
    }

    /// The snapshot's folder in the cache; a file is in it after [`fetch`](Self::fetch).
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The files of the repository; offline, those that are in the cache.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// Whether the repository has the file.
    pub fn has(&self, file: &str) -> bool {
        self.files.iter().any(|name| name == file)
    }

    /// Whether only the cache was asked.
    pub(crate) fn is_offline(&self) -> bool {
        self.remote.is_none()
    }

    pub(crate) fn not_cached(&self, what: &str) -> HubError {
        self.hub
            .not_cached(&self.repository, &format!("{what} is"), &self.offline_because)
    }

    /// The path of a file, downloaded if the cache does not have it.
    ///
    /// # Errors
    /// [`HubError::MissingFile`], [`HubError::NotCached`], [`HubError::UnsafePath`], [`HubError::Download`],
    /// [`HubError::Incomplete`], [`HubError::AccessDenied`].
    pub fn fetch(&self, file: &str) -> Result<PathBuf, HubError> {
        let path = join_checked(&self.folder, file, &self.place())?;
        if path.is_file() {
            return Ok(path);
        }
        let Some(remote) = &self.remote else {
            return Err(self.not_cached(file));
        };
        if !self.has(file) {
            return Err(HubError::MissingFile {
                place: self.place(),
                file: file.to_string(),
            });
        }
        let explain = |error: ApiError| match status(&error) {
            Some(404) => HubError::MissingFile {
                place: self.place(),
                file: file.to_string(),
            },
            _ => self.hub.explain(&error, &self.repository, file),
        };
        let expected = self.announced(remote, file).map_err(explain)??;
        tracing::info!(repository = %self.repository, file, bytes = expected, "downloading");
        let downloaded = if self.hub.progress {
            remote.download_with_progress(file, Bar::new())
        } else {
            remote.download_with_progress(file, ())
        };
        let path = downloaded.map_err(explain)?;
        self.check_length(&path, file, expected)?;
        Ok(path)
    }

    /// The file's length as the endpoint announces it, after checking its name in the cache.
    fn announced(&self, remote: &ApiRepo, file: &str) -> Result<Result<u64, HubError>, ApiError> {
        let api = self.hub.api()?;
        let announced = api.metadata(&remote.url(file))?;
        let name_is_safe = is_identifier(announced.etag()) && is_identifier(announced.commit_hash());
        Ok(if name_is_safe {
            Ok(announced.size() as u64)
        } else {
            Err(HubError::Download {
                endpoint: self.hub.endpoint.clone(),
                repo: self.repository.clone(),
                file: file.to_string(),
                reason: format!(
                    "its ETag `{}` or commit cannot name a file in the cache",
                    announced.etag()
                ),
            })
        })
    }

    /// A server that ignores ranges, or a broken resume, shows as a wrong length.
    fn check_length(&self, path: &Path, file: &str, expected: u64) -> Result<(), HubError> {
        let actual = std::fs::metadata(path)
            .map_err(|source| HubError::io("read", path, source))?
            .len();
        if actual == expected {
            return Ok(());
        }
        // Both the link and its target are removed, or the next load would find the damaged file.
        if let Ok(blob) = std::fs::canonicalize(path) {
            let _ = std::fs::remove_file(blob);
        }
        let _ = std::fs::remove_file(path);
        Err(HubError::Incomplete {
            repo: self.repository.clone(),
            file: file.to_string(),
            expected,
            actual,
        })
    }
}

/// Names of the files below a folder, with `/` between components; links that lead nowhere are left out.
fn list_files(folder: &Path) -> Vec<String> {
    fn walk(folder: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let name = format!("{prefix}{name}");
            if entry.path().is_file() {
                names.push(name);
            } else if depth > 0 && entry.path().is_dir() {
                walk(&entry.path(), &format!("{name}/"), depth - 1, names);
            }
        }
    }
    let mut names = Vec::new();
    walk(folder, "", 8, &mut names);
    names.sort();
    names
}

/// A progress bar per download.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        Self(ProgressBar::new(0))
    }
}

impl Progress for Bar {
    fn init(&mut self, size: usize, file: &str) {
        let template = "{msg} [{elapsed}] {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} ({eta})";
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style);
        }
        self.0.set_length(size as u64);
        self.0.set_position(0);
        self.0.set_message(file.to_string());
    }

    fn update(&mut self, size: usize) {
        self.0.inc(size as u64);
    }

    fn finish(&mut self) {
        self.0.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> Hub {
        let vars: Vec<(String, String)> = vars.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Hub::from_vars(move |name| vars.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()))
    }

    #[test]
    fn the_environment_is_read_as_python_reads_it() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_from_file\n").unwrap();
        let hub = from(&[
            ("HF_HOME", home.path().to_str().unwrap()),
            ("HF_ENDPOINT", "https://mirror.example/"),
        ]);
        assert_eq!(hub.cache, home.path().join("hub"));
        assert_eq!(hub.endpoint, "https://mirror.example");
        assert_eq!(hub.token.as_deref(), Some("hf_from_file"));
        assert!(!hub.offline);

        let hub = from(&[
            ("HF_HOME", home.path().to_str().unwrap()),
            ("HF_HUB_CACHE", "/elsewhere"),
            ("HF_TOKEN", "hf_from_env"),
            ("HF_HUB_OFFLINE", "1"),
        ]);
        assert_eq!(hub.cache, PathBuf::from("/elsewhere"));
        assert_eq!(hub.token.as_deref(), Some("hf_from_env"));
        assert!(hub.offline);
        assert!(
            !format!("{hub:?}").contains("hf_from_env"),
            "a token must not reach a log"
        );
        assert!(
            from(&[("HF_HUB_OFFLINE", "0")])
                .cache
                .ends_with("huggingface/hub")
        );
        assert!(!from(&[("HF_HUB_OFFLINE", "0")]).offline);
    }
}
