use super::*;

fn ip(text: &str) -> Addr {
    parse_ip(text).unwrap()
}

fn owner(id: &str) -> Owner {
    Owner::new(id, "eth0")
}

/// A state directory that does not exist yet, in a folder that is removed when this value is dropped.
struct Scratch {
    folder: tempfile::TempDir,
    dir: PathBuf,
}

impl Scratch {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("net");
        Self { folder, dir }
    }

    /// Returns a state directory in which 10.0.0.2 is assigned to the container `a`, with an index.
    fn indexed() -> Self {
        let scratch = Self::new();
        let mut store = Store::open(&scratch.dir).unwrap();
        store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap();
        store.save_index();
        scratch
    }

    fn write(&self, files: &[(&str, &str)]) {
        fs::create_dir_all(&self.dir).unwrap();
        for (name, content) in files {
            fs::write(self.dir.join(name), content).unwrap();
        }
    }
}

fn has(store: &Store, id: &str) -> bool {
    !store.names(&owner(id)).is_empty()
}

/// A process that was killed can leave a draft that is not the file of an address yet, or is one already.
#[test]
fn the_draft_of_a_killed_process_neither_hinders_nor_changes() {
    let scratch = Scratch::indexed();
    let draft = scratch.folder.path().join(".net.new");
    assert!(!draft.exists());
    for (name, next) in [("unpublished", "10.0.0.3"), ("10.0.0.2", "10.0.0.4")] {
        match name {
            "unpublished" => fs::write(&draft, "killed").unwrap(),
            published => fs::hard_link(scratch.dir.join(published), &draft).unwrap(),
        }
        let mut store = Store::open(&scratch.dir).unwrap();
        assert_eq!(store.reserve(&owner(next), ip(next), 0), Ok(true));
        assert!(has(&store, next) && has(&store, "a"));
        let content = fs::read(scratch.dir.join("10.0.0.2")).unwrap();
        assert_eq!(content, b"a\r\neth0");
        assert!(!draft.exists());
    }
}

#[test]
fn files_have_host_locals_format() {
    let scratch = Scratch::new();
    let dir = &scratch.dir;
    let mut store = Store::open(dir).unwrap();
    assert_eq!(store.reserve(&owner("a"), ip("fd00::10"), 0), Ok(true));
    assert_eq!(store.reserve(&owner("b"), ip("fd00::10"), 0), Ok(false));
    assert_eq!(store.reserve(&owner("b"), ip("fd00::2"), 0), Ok(true));
    assert_eq!(fs::read(dir.join("fd00::10")).unwrap(), b"a\r\neth0");
    assert_eq!(
        fs::read(dir.join("last_reserved_ip.0")).unwrap(),
        b"fd00::2",
        "shorter than the one before"
    );
    assert_eq!(store.cursor(0), Some(ip("fd00::2")));
    assert_eq!(store.cursor(1), None);
}

#[test]
fn owners_are_found_in_either_format() {
    let scratch = Scratch::new();
    let dir = &scratch.dir;
    fs::create_dir_all(dir.join("in")).unwrap();
    scratch.write(&[
        ("10.0.0.3", "a\r\neth0"),
        ("10.0.0.20", "\n a\r\neth0 \u{a0}\n"),
        ("10.0.0.4", "a"),
        ("10.0.0.5", "a\r\neth1"),
        ("x", "a\r\neth0"),
        ("lock", "a"),
        ("last_reserved_ip.0", "a"),
    ]);
    let mut store = Store::open(dir).unwrap();
    let found = ["10.0.0.20", "10.0.0.3", "10.0.0.4", "x"];
    assert_eq!(store.names(&owner("a")), found);
    assert!(!has(&store, "b"));
    store.release(&owner("a"));
    assert_eq!(store.names(&owner("a")), ["10.0.0.4"]);
    assert!(!dir.join("x").exists() && dir.join("lock").exists());
    store.release(&owner("a"));
    assert!(!has(&store, "a"));
    assert!(dir.join("10.0.0.5").exists());
}

/// Makes a file appear a minute old. The index contains no file that has changed in the current tick of the kernel's
/// clock, because a second change in the same tick would not show.
fn settle(path: &Path) {
    let past = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    File::open(path).unwrap().set_modified(past).unwrap();
}

/// Opens a state directory, and writes the index if the files differ from it.
fn indexed(dir: &Path) -> Store {
    let store = Store::open(dir).unwrap();
    store.save_index();
    store
}

#[test]
fn the_index_is_used_and_changed_files_are_read_again() {
    let scratch = Scratch::indexed();
    let dir = &scratch.dir;
    settle(&dir.join("10.0.0.2"));
    drop(indexed(dir));
    let store = Store::open(dir).unwrap();
    assert!(!store.changed, "the index was used");
    drop(store);
    // Each write overwrites the file in place, which does not break the seal. The first two writes happen within one
    // tick, and the last write sets the file's modification time to an old time. After each write, the new owner must
    // be found.
    for (id, old) in [("b", false), ("c", false), ("d", true)] {
        fs::write(dir.join("10.0.0.2"), format!("{id}\r\neth0")).unwrap();
        if old {
            settle(&dir.join("10.0.0.2"));
        }
        let store = indexed(dir);
        assert!(has(&store, id) && !has(&store, "a"), "{id}");
    }
    fs::write(dir.join("10.0.0.3"), "e\r\neth0").unwrap();
    let store = Store::open(dir).unwrap();
    assert!(has(&store, "d") && has(&store, "e"));
}

#[test]
fn a_match_in_the_index_is_read_from_the_file() {
    let scratch = Scratch::indexed();
    let dir = &scratch.dir;
    let path = dir.join("10.0.0.2");
    settle(&path);
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    drop(indexed(dir));
    // The new content has the size of the old content, and the modification time is set to the old time. So the index
    // does not show the change.
    fs::write(&path, "b\r\neth0").unwrap();
    File::open(&path).unwrap().set_modified(time).unwrap();
    let mut store = Store::open(dir).unwrap();
    assert!(!store.changed, "the index was used");
    assert!(!has(&store, "a"));
    store.release(&owner("a"));
    assert!(path.exists());
}

#[test]
fn a_file_written_over_in_the_oldest_format_is_released() {
    let scratch = Scratch::indexed();
    let dir = &scratch.dir;
    fs::write(dir.join("10.0.0.2"), "a").unwrap();
    let mut store = Store::open(dir).unwrap();
    store.release(&owner("a"));
    assert!(!dir.join("10.0.0.2").exists());
}

#[test]
fn changes_without_the_lock_during_a_call_are_found_by_the_next_call() {
    let scratch = Scratch::indexed();
    let dir = &scratch.dir;
    let mut store = Store::open(dir).unwrap();
    fs::remove_file(dir.join("10.0.0.2")).unwrap();
    fs::write(dir.join("10.0.0.9"), "c\r\neth0").unwrap();
    store.reserve(&owner("b"), ip("10.0.0.3"), 0).unwrap();
    store.save_index();
    drop(store);
    let mut store = Store::open(dir).unwrap();
    assert_eq!(store.reserve(&owner("d"), ip("10.0.0.2"), 0), Ok(true));
    assert!(has(&store, "c"), "an owner by hand");
    fs::write(dir.join("10.0.0.10"), "e\r\neth0").unwrap();
    store.save_index();
    drop(store);
    let store = Store::open(dir).unwrap();
    assert!(has(&store, "e"), "one more, and none removed");
}

#[test]
fn a_directory_with_a_symbolic_link_gets_no_index() {
    let scratch = Scratch::indexed();
    let dir = &scratch.dir;
    let elsewhere = scratch.folder.path().join("elsewhere");
    std::os::unix::fs::symlink(&elsewhere, dir.join("10.0.0.3")).unwrap();
    for id in ["b", "c"] {
        fs::write(&elsewhere, format!("{id}\r\neth0")).unwrap();
        settle(&elsewhere);
        assert!(has(&indexed(dir), id), "{id}");
        assert_eq!(index::load(dir), None);
    }
}

#[test]
fn nothing_is_written_through_symbolic_links() {
    let scratch = Scratch::new();
    let (root, dir) = (scratch.folder.path(), &scratch.dir);
    let victim = root.join("victim");
    fs::write(&victim, "kept").unwrap();
    let link = |path: &Path| std::os::unix::fs::symlink(&victim, path).unwrap();
    drop(Store::open(dir).unwrap());
    link(&dir.join("last_reserved_ip.0"));
    link(&dir.join("10.0.0.3"));
    let mut store = Store::open(dir).unwrap();
    let error = store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap_err();
    assert!(
        error.contains("last_reserved_ip.0: it is a symbolic link"),
        "{error}"
    );
    assert!(error.ends_with("remove it"), "{error}");
    assert!(!dir.join("10.0.0.2").exists(), "the address is free");
    assert_eq!(store.reserve(&owner("a"), ip("10.0.0.3"), 1), Ok(false));
    drop(store);
    fs::remove_file(dir.join("last_reserved_ip.0")).unwrap();
    fs::remove_file(dir.join("10.0.0.3")).unwrap();
    link(&root.join(".net.index"));
    drop(indexed(dir));
    assert_eq!(fs::read(&victim).unwrap(), b"kept");
    fs::remove_file(&victim).unwrap();
    fs::remove_file(dir.join("lock")).unwrap();
    link(&dir.join("lock"));
    let error = Store::open(dir).err().unwrap();
    assert!(error.contains("lock: it is a symbolic link"), "{error}");
    assert!(!victim.exists(), "nothing is made where it leads");
}

#[test]
fn gc_removes_files_of_invalid_attachments() {
    let scratch = Scratch::new();
    let dir = &scratch.dir;
    scratch.write(&[
        ("10.0.0.2", "a\r\neth0"),
        ("10.0.0.3", "a\r\neth1"),
        ("10.0.0.4", "a"),
        ("10.0.0.5", "b"),
        ("10.0.0.6", ""),
        ("notes", "b"),
    ]);
    let mut store = Store::open(dir).unwrap();
    store.collect(&[ValidAttachment {
        container_id: "a".to_owned(),
        ifname: "eth0".to_owned(),
    }]);
    let left: Vec<&String> = store.files.keys().collect();
    assert_eq!(left, ["10.0.0.2", "10.0.0.4", "notes"]);
    store.collect(&[]);
    assert_eq!(store.files.len(), 1);
}

#[test]
fn an_address_whose_cursor_cannot_be_written_stays_free() {
    let scratch = Scratch::new();
    let dir = &scratch.dir;
    fs::create_dir_all(dir.join("last_reserved_ip.0")).unwrap();
    let mut store = Store::open(dir).unwrap();
    let error = store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap_err();
    assert!(error.contains("last_reserved_ip.0"), "{error}");
    assert!(!dir.join("10.0.0.2").exists() && !has(&store, "a"));
    assert_eq!(store.reserve(&owner("a"), ip("10.0.0.2"), 1), Ok(true));
}

#[test]
fn errors_name_the_path() {
    let scratch = Scratch::new();
    let root = scratch.folder.path();
    fs::write(root.join("file"), "").unwrap();
    let below = root.join("file/net");
    let error = Store::open(&below).err().unwrap();
    assert!(error.contains("/file/net"), "{error}");
    fs::create_dir_all(scratch.dir.join("lock")).unwrap();
    let error = Store::open(&scratch.dir).err().unwrap();
    assert!(error.contains("/net/lock"), "{error}");
}
