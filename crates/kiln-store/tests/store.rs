//! Entries on disk: found again, damaged, evicted, unwritable. (kiln-cpu's `tests/cache.rs` has several
//! processes.)

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use kiln_store::{CacheFolder, Key, Store};

fn key(name: &str) -> Key {
    Key::of([name])
}

/// Sets the time of last use of an entry to `seconds` ago.
fn age(store: &Store, name: &str, seconds: u64) {
    let path = store.folder().unwrap().join(format!("{}.json", key(name)));
    let then = SystemTime::now() - Duration::from_secs(seconds);
    File::options()
        .append(true)
        .open(path)
        .unwrap()
        .set_modified(then)
        .unwrap();
}

fn content(store: &Store, name: &str) -> Option<Vec<u8>> {
    store.get(&key(name)).map(|found| found.content)
}

#[test]
fn keys_have_borders_between_their_parts() {
    assert_ne!(Key::of(["a", "b"]), Key::of(["ab", ""]));
    assert_eq!(Key::of(["a", "b"]), Key::builder().field("a", "b").finish());
    assert_eq!(key("a").to_string().len(), 64);
}

#[test]
fn what_was_put_is_found_and_damage_is_not_given_out() {
    let folder = tempfile::tempdir().unwrap();
    let store = CacheFolder::at(folder.path(), 1 << 20).store("code", "cubin");
    assert!(store.get(&key("a")).is_none());
    store.put(&key("a"), b"machine code", "a kernel", "beside it");
    let found = store.get(&key("a")).unwrap();
    assert_eq!(
        (found.content.as_slice(), found.payload.as_str()),
        (&b"machine code"[..], "beside it")
    );
    assert_eq!(fs::read(&found.path).unwrap(), b"machine code");
    fs::write(&found.path, b"machine cope").unwrap();
    assert!(store.get(&key("a")).is_none());
    assert!(!found.path.exists());
    // An entry that its user cannot use is damaged as well.
    store.put(&key("a"), b"machine code", "a kernel", "");
    assert!(
        store
            .get_if(&key("a"), |_| Err::<(), _>("does not load".into()))
            .is_none()
    );
    assert!(store.get(&key("a")).is_none());
}

#[test]
fn the_entry_used_longest_ago_goes_first_whichever_store_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let roomy = CacheFolder::at(folder.path(), 1 << 20);
    let (steps, code) = (roomy.store("steps", "so"), roomy.store("code", "cubin"));
    for (store, name, seconds) in [(&steps, "oldest", 40), (&code, "older", 30), (&steps, "old", 20)] {
        store.put(&key(name), &[0; 1000], "step", "");
        age(store, name, seconds);
    }
    let sizes: Vec<u64> = roomy
        .list()
        .unwrap()
        .iter()
        .map(|listing| listing.bytes())
        .collect();
    let one = sizes[0];
    assert_eq!(sizes, [one, 2 * one]);
    // Room for two entries and a half.
    let tight = CacheFolder::at(folder.path(), one * 5 / 2);
    tight
        .store("code", "cubin")
        .put(&key("new"), &[0; 1000], "new", "");
    assert_eq!((content(&steps, "oldest"), content(&code, "older")), (None, None));
    assert!(content(&steps, "old").is_some() && content(&code, "new").is_some());
    // The same handle notices what it adds later, too.
    age(&steps, "old", 20);
    tight
        .store("steps", "so")
        .put(&key("newest"), &[0; 1000], "newest", "");
    assert!(content(&steps, "old").is_none() && content(&steps, "newest").is_some());
}

#[test]
fn clearing_removes_entries_and_notes_of_every_store() {
    let folder = tempfile::tempdir().unwrap();
    let root = CacheFolder::at(folder.path(), 1 << 20);
    let (steps, code) = (root.store("steps", "so"), root.store("code", "cubin"));
    steps.put(&key("step"), b"object", "train_step", "");
    code.put(&key("kernel"), b"code", "points", "");
    let note = |text: &str| {
        steps
            .note(&key("note"), |_| true, || Ok::<_, ()>(text.to_owned()))
            .unwrap()
    };
    assert_eq!((note("first"), note("second")), ("first".into(), "first".into()));
    let names: Vec<(String, String)> = root
        .list()
        .unwrap()
        .into_iter()
        .flat_map(|listing| {
            listing
                .entries
                .iter()
                .map(|entry| (listing.store.clone(), entry.name()))
                .collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(
        names,
        [
            ("code".into(), "points".into()),
            ("steps".into(), "train_step".to_string())
        ]
    );
    assert_eq!(root.clear().unwrap().0, 2);
    assert_eq!(note("third"), "third");
    assert!(
        root.list()
            .unwrap()
            .iter()
            .all(|listing| listing.entries.is_empty())
    );
}

/// Killed programs leave files that they were writing, and locks.
#[test]
fn what_killed_programs_leave_behind_goes() {
    let folder = tempfile::tempdir().unwrap();
    let root = CacheFolder::at(folder.path(), 1 << 20);
    let store = root.store("steps", "so");
    let (abandoned, held) = (store.lock(&key("abandoned")), store.lock(&key("held")));
    drop(abandoned);
    let file = |name: &str, hours: u64| {
        let path = store.folder().unwrap().join(name);
        fs::write(&path, [0; 10]).unwrap();
        let then = SystemTime::now() - Duration::from_hours(hours);
        let file = File::options().append(true).open(path).unwrap();
        file.set_modified(then).unwrap();
    };
    file(".writing-old", 25);
    file(".writing-new", 1);
    file("old", 25);
    let names = || {
        let files = fs::read_dir(store.folder().unwrap()).unwrap();
        let mut names: Vec<_> = files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with(&key("step").to_string()))
            .collect();
        names.sort();
        names
    };
    let lock = |name: &str| format!("{}.lock", key(name));
    // Other processes may be writing now, so storing removes what is old alone.
    store.put(&key("step"), b"object", "train_step", "");
    let mut expected = [
        ".writing-new".into(),
        "old".into(),
        lock("abandoned"),
        lock("held"),
    ];
    expected.sort();
    assert_eq!(names(), expected);
    let bytes: u64 = root.list().unwrap().iter().map(|listing| listing.bytes()).sum();
    assert_eq!(root.clear().unwrap(), (1, bytes + 10));
    let mut expected = ["old".to_string(), lock("held")];
    expected.sort();
    assert_eq!(names(), expected);
    drop(held);
    root.clear().unwrap();
    assert_eq!(names(), ["old"]);
}

#[test]
fn without_a_folder_nothing_is_kept() {
    let store = Store::disabled();
    store.put(&key("a"), b"code", "a", "");
    assert!(store.get(&key("a")).is_none() && store.lock(&key("a")).is_none());
    assert_eq!(CacheFolder::disabled().clear().unwrap(), (0, 0));
}
