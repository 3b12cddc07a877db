"""`Store` on a real API server: watches keep copies up to date, and changes are requests."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator

import httpx

from jupyter_gpushare.kube.cluster.api_server import ApiServer as Address
from tests.kube.store import KINDS, Json, Refused
from tests.waiting import PATIENCE_S, until

_SEATS = ("pods", "podgroups")
_WATCH_S = 20
_RETRY_S = 0.2


class RealStore:
    """All objects by plural and (namespace, name); changes by this process are visible at once.

    Collections that the API server does not have stay empty.
    """

    def __init__(self, address: Address) -> None:
        self.version = 0  # how often a pod or PodGroup changed
        self._client = httpx.Client(
            base_url=address.url,
            verify=ssl.create_default_context(cafile=address.ca_file),
            headers={"Authorization": f"Bearer {address.token}"},
            timeout=httpx.Timeout(PATIENCE_S, read=None),
            trust_env=False,
        )
        self._objects: dict[str, dict[tuple[str, str], Json]] = {plural: {} for _, _, plural in KINDS}
        self._listed: set[str] = set()
        self._gone: set[str] = set()  # uids of deleted objects: an older event must not restore them
        self._lock = threading.Lock()
        self._closed = threading.Event()
        follow = [threading.Thread(target=self._follow, args=(kind,), daemon=True) for kind in KINDS]
        self._threads = follow
        for thread in follow:
            thread.start()
        until(lambda: len(self._listed) == len(KINDS), "every collection is read")

    def close(self) -> None:
        """Stop all watches; call this after the API server has ended."""
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    # ---- reading -------------------------------------------------------------

    def all(self, plural: str, namespace: str = "") -> Iterator[Json]:
        """Return the objects of a collection, in all namespaces or in one."""
        with self._lock:
            found = list(self._objects[plural].items())
        return (obj for (place, _), obj in found if not namespace or place == namespace)

    def get(self, plural: str, namespace: str, name: str) -> Json:
        """Return one object.

        Raises:
            Refused: the object does not exist.
        """
        with self._lock:
            found = self._objects[plural].get((namespace, name))
        if found is None:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        return found

    # ---- changes -------------------------------------------------------------

    def create(self, plural: str, namespace: str, body: Json) -> Json:
        """Create an object with its status."""
        group, version, _ = _kind(plural)
        head = {"apiVersion": f"{group}/{version}" if group else version, "kind": KINDS[_kind(plural)][1]}
        made = self._send("POST", _path(plural, namespace), head | body)
        if "status" in body:
            name = body["metadata"]["name"]
            made = self._patch(plural, namespace, name, {"status": body["status"]}, "status")
        return self._put(plural, made)

    def patch(self, plural: str, namespace: str, name: str, body: Json, *, part: str = "") -> Json:
        """Merge ``body``; ``part`` is "status" for that subresource."""
        return self._put(plural, self._patch(plural, namespace, name, body, part))

    def _patch(self, plural: str, namespace: str, name: str, body: Json, part: str) -> Json:
        path = f"{_path(plural, namespace, name)}/{part}".rstrip("/")
        return self._send("PATCH", path, body, kind="application/merge-patch+json")

    def bind(self, namespace: str, name: str, node: str) -> None:
        """Bind a pod to a node."""
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        body |= {"target": {"apiVersion": "v1", "kind": "Node", "name": node}}
        self._send("POST", f"{_path('pods', namespace, name)}/binding", body)
        self._read("pods", namespace, name)

    def delete(
        self, plural: str, namespace: str, name: str, *, grace_s: int | None = None, version: str = ""
    ) -> None:
        """Delete an object; a pod that runs somewhere ends first, within its grace."""
        body: Json = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        if version:
            body["preconditions"] = {"resourceVersion": version}
        self._send("DELETE", _path(plural, namespace, name), body)
        self._read(plural, namespace, name)

    def delete_all(self, plural: str) -> None:
        """Delete every object of a collection except Kubernetes' own; return once none is left."""

        def is_empty() -> bool:
            left = [obj for obj in self.all(plural) if not _is_system(obj["metadata"])]
            for obj in left:
                meta = obj["metadata"]
                with contextlib.suppress(Refused):  # it has gone in between
                    self.delete(plural, meta.get("namespace", ""), meta["name"], grace_s=0)
            return not left

        until(is_empty, f"all {plural} are deleted")

    # ---- the API server ------------------------------------------------------

    def _send(self, method: str, path: str, body: Json, kind: str = "application/json") -> Json:
        answer = self._client.request(
            method, path, content=json.dumps(body), headers={"Content-Type": kind}, timeout=PATIENCE_S
        )
        if answer.status_code >= 300:  # in plain text where there is no such collection
            raise Refused(answer.status_code, "", answer.text)
        said: Json = answer.json()
        return said

    def _read(self, plural: str, namespace: str, name: str) -> None:
        """Read an object again, or record that it is gone."""
        try:
            self._put(plural, self._send("GET", _path(plural, namespace, name), {}))
        except Refused as refused:
            if refused.status != 404:
                raise
            with self._lock:
                self._forget(plural, self._objects[plural].get((namespace, name)))

    def _put(self, plural: str, obj: Json) -> Json:
        meta = obj["metadata"]
        key, version = (meta.get("namespace", ""), meta["name"]), int(meta["resourceVersion"])
        with self._lock:
            known = self._objects[plural].get(key)
            newest = int(known["metadata"]["resourceVersion"]) if known is not None else 0
            if version > newest and meta["uid"] not in self._gone:
                self._objects[plural][key] = obj
                self.version += plural in _SEATS
        return obj

    def _forget(self, plural: str, obj: Json | None) -> None:
        if obj is None:
            return
        meta = obj["metadata"]
        self._gone.add(meta["uid"])
        known = self._objects[plural].get((meta.get("namespace", ""), meta["name"]))
        if known is not None and known["metadata"]["uid"] == meta["uid"]:
            del self._objects[plural][meta.get("namespace", ""), meta["name"]]
            self.version += plural in _SEATS

    def _follow(self, kind: tuple[str, str, str]) -> None:
        plural = kind[2]
        while not self._closed.is_set():
            try:
                version = self._list(plural)
                if version is None:
                    self._listed.add(plural)
                    return
                self._listed.add(plural)
                self._watch(plural, version)
            except (httpx.HTTPError, Refused):
                time.sleep(_RETRY_S)

    def _list(self, plural: str) -> str | None:
        """Read a collection and return its version, or None if the API server does not have it."""
        try:
            said = self._send("GET", _path(plural, ""), {})
        except Refused as refused:
            if refused.status != 404:
                raise
            return None
        there = {obj["metadata"]["uid"] for obj in said["items"]}
        for obj in said["items"]:
            self._put(plural, obj)
        with self._lock:
            lost = [o for o in self._objects[plural].values() if o["metadata"]["uid"] not in there]
            for obj in lost:
                if int(obj["metadata"]["resourceVersion"]) <= int(said["metadata"]["resourceVersion"]):
                    self._forget(plural, obj)
        return str(said["metadata"]["resourceVersion"])

    def _watch(self, plural: str, version: str) -> None:
        ask = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        with self._client.stream("GET", _path(plural, ""), params=ask) as answer:
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    with self._lock:
                        self._forget(plural, event["object"])
                else:
                    self._put(plural, event["object"])


def _kind(plural: str) -> tuple[str, str, str]:
    (found,) = [kind for kind in KINDS if kind[2] == plural]
    return found


def _path(plural: str, namespace: str, name: str = "") -> str:
    group, version, _ = _kind(plural)
    root = f"/apis/{group}/{version}" if group else f"/api/{version}"
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{place}/{plural}/{name}".rstrip("/")


def _is_system(meta: Json) -> bool:
    return meta["name"].startswith("system-") or meta.get("namespace", "").startswith("kube-")
