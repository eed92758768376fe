use super::*;
use tempfile::tempdir;

fn ip(text: &str) -> Addr {
    parse_ip(text).unwrap()
}

fn owner(id: &str) -> Owner {
    Owner::new(id, "eth0")
}

#[test]
fn files_are_host_locals() {
    let scratch = tempdir().unwrap();
    let dir = scratch.path().join("net");
    let mut store = Store::open(&dir).unwrap();
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
    let scratch = tempdir().unwrap();
    let dir = scratch.path().join("net");
    fs::create_dir_all(dir.join("in")).unwrap();
    for (name, content) in [
        ("10.0.0.3", "a\r\neth0"),
        ("10.0.0.20", "\n a\r\neth0 \u{a0}\n"),
        ("10.0.0.4", "a"),
        ("10.0.0.5", "a\r\neth1"),
        ("x", "a\r\neth0"),
        ("lock", "a"),
        ("last_reserved_ip.0", "a"),
    ] {
        fs::write(dir.join(name), content).unwrap();
    }
    let mut store = Store::open(&dir).unwrap();
    let found = ["10.0.0.20", "10.0.0.3", "10.0.0.4"].map(ip);
    assert_eq!(store.addresses(&owner("a")), found);
    assert!(store.has_any(&owner("a")) && !store.has_any(&owner("b")));
    store.release(&owner("a"));
    assert_eq!(store.addresses(&owner("a")), [ip("10.0.0.4")]);
    assert!(!dir.join("x").exists() && dir.join("lock").exists());
    store.release(&owner("a"));
    assert!(!store.has_any(&owner("a")));
    assert!(dir.join("10.0.0.5").exists());
}

#[test]
fn nothing_is_written_through_symbolic_links() {
    let scratch = tempdir().unwrap();
    let root = scratch.path();
    let victim = root.join("victim");
    fs::write(&victim, "kept").unwrap();
    let link = |path: &Path| std::os::unix::fs::symlink(&victim, path).unwrap();
    let dir = scratch.path().join("net");
    drop(Store::open(&dir).unwrap());
    link(&dir.join("last_reserved_ip.0"));
    link(&dir.join("10.0.0.3"));
    let mut store = Store::open(&dir).unwrap();
    let told = store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap_err();
    assert!(
        told.contains("last_reserved_ip.0: it is a symbolic link"),
        "{told}"
    );
    assert!(told.ends_with("remove it"), "{told}");
    assert!(!dir.join("10.0.0.2").exists(), "the address is free");
    assert_eq!(store.reserve(&owner("a"), ip("10.0.0.3"), 1), Ok(false));
    drop(store);
    fs::remove_file(dir.join("last_reserved_ip.0")).unwrap();
    fs::remove_file(dir.join("10.0.0.3")).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"kept");
    fs::remove_file(&victim).unwrap();
    fs::remove_file(dir.join("lock")).unwrap();
    link(&dir.join("lock"));
    let told = Store::open(&dir).err().unwrap();
    assert!(told.contains("lock: it is a symbolic link"), "{told}");
    assert!(!victim.exists(), "nothing is made where it leads");
}

#[test]
fn garbage_is_what_nobody_valid_owns() {
    let scratch = tempdir().unwrap();
    let dir = scratch.path().join("net");
    let mut store = Store::open(&dir).unwrap();
    for (name, content) in [
        ("10.0.0.2", "a\r\neth0"),
        ("10.0.0.3", "a\r\neth1"),
        ("10.0.0.4", "a"),
        ("10.0.0.5", "b"),
        ("10.0.0.6", ""),
        ("notes", "b"),
    ] {
        fs::write(dir.join(name), content).unwrap();
    }
    drop(store);
    store = Store::open(&dir).unwrap();
    store.collect(&[Valid {
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
    let scratch = tempdir().unwrap();
    let dir = scratch.path().join("net");
    fs::create_dir_all(dir.join("last_reserved_ip.0")).unwrap();
    let mut store = Store::open(&dir).unwrap();
    let error = store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap_err();
    assert!(error.contains("last_reserved_ip.0"), "{error}");
    assert!(!dir.join("10.0.0.2").exists() && !store.has_any(&owner("a")));
    assert_eq!(store.reserve(&owner("a"), ip("10.0.0.2"), 1), Ok(true));
}

#[test]
fn what_cannot_be_made_is_named() {
    let scratch = tempdir().unwrap();
    fs::write(scratch.path().join("file"), "").unwrap();
    let below = scratch.path().join("file/net");
    let error = Store::open(&below).err().unwrap();
    assert!(error.contains("/file/net"), "{error}");
    fs::create_dir_all(scratch.path().join("net/lock")).unwrap();
    let error = Store::open(&scratch.path().join("net")).err().unwrap();
    assert!(error.contains("/net/lock"), "{error}");
}
