"""Keras objects that the user's functions capture, as they are pickled.

Keras pickles its objects as configurations, weights and names of classes. Here, what such a copy
would lack goes along: classes and functions (`parts`), what was set after an object was made
(`kept`), and what a model was compiled with (`compiled`). What cannot is refused (`told`,
`holders`). Keras itself is imported at use, by whoever has a Keras object.
"""
